"""Exporter actors of the GPUs: created, found again after a restart, queried.

Must not know jobs. Begin with ``exporters.py``.
"""
