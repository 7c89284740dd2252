"""Estimates how long jobs will still run, from their reports, and checks the estimates when the jobs have ended.

Begin with ``desk.py``; the arithmetic is in ``core/estimates``.
"""
