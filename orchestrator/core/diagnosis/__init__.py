"""Finds what is wrong with jobs, ranks, nodes and GPUs, from observations. Pure.

Begin with ``health.py``.
"""
