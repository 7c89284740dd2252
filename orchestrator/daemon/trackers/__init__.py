"""Experiment trackers of live jobs, each fed by a process of its own. Begin with ``job_trackers.py``."""
