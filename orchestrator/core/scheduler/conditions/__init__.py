"""Conditions of jobs besides free resources: other jobs, a start time, a matrix's limit. Begin with ``release.py``."""
