"""Compares runs: aligned by step or time, each difference with an interval. Begin with ``comparing.py``."""
