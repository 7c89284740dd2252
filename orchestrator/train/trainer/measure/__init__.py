"""Measurements of a training run: throughput, step parts, memory, energy, MFU, and comparison of runs.

Changes nothing in training. Begin with ``metrics.py``.
"""
