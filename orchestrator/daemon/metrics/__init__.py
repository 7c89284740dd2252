"""Metrics of the daemon: the goodput ledger and latencies, and a local Prometheus.

Begin with ``metering.py``.
"""
