"""Predicts how many ranks pay, from a few steps on one rank and from the speed of the machine's links.

Must not run whole benchmarks: ``orch bench`` does. Begin with ``cost_model.py``.
"""
