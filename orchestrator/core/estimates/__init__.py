"""Estimates how long a job will still run, from what it has reported. Pure; begin with ``time_left.py``."""
