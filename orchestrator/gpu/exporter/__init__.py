"""The Prometheus exporter of a node's GPUs, as plain objects.

Must not know Ray. Begin with ``exporter.py``.
"""
