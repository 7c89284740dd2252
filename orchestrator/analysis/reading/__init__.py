"""Reads a job's telemetry, recordings and gputop's files into one form: ``series.py``. Begin with ``sources.py``."""
