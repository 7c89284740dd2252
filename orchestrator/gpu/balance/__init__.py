"""Load balance of a job's GPUs, and the reasons for a poor one.

Pure functions on samples. Begin with ``balance.py``.
"""
