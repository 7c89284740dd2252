"""Diagnosis of the jobs that are live: gathers what is seen of each, and posts what ``core/diagnosis`` makes of it.

Begin with ``finding_watch.py``.
"""
