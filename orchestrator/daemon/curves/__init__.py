"""Reads jobs' records (``metrics.jsonl``, telemetry) for drawing, a bounded part of them at once. Begin with ``desk.py``."""
