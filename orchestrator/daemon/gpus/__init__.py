"""GPUs as the daemon sees them: loads, balance, and the recording of jobs' telemetry.

Begin with ``watch.py``.
"""
