"""The Prometheus exporter of a node's GPUs, as plain objects.

Must not depend on Ray. Begin with ``exporter.py``.
"""
