"""The daemon's metrics: the goodput ledger and latencies, and a local Prometheus.

Begin with ``metering.py``.
"""
