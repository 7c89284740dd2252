"""Diagnosis of live jobs: collects observations of each, and posts the findings of ``core/diagnosis``.

Begin with ``finding_watch.py``.
"""
