"""Exporter actors of the GPUs: created, found again after a restart, queried.

Must not depend on jobs' records. Begin with ``exporters.py``.
"""
