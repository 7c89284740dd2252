"""GPUs in the daemon: loads, balance, reservations of bad ones, and the recording of jobs' telemetry.

Begin with ``watch.py``.
"""
