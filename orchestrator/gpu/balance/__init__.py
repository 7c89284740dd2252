"""Load balance of a job's GPUs, and why it is poor.

Pure functions on samples. Begin with ``balance.py``.
"""
