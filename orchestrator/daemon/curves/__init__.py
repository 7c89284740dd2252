"""Reads jobs' records (``metrics.jsonl``, telemetry) for charts, with a bound on what is read. Begin with ``desk.py``."""
