"""Nodes as the daemon sees them: quarantine and views.

Begin with ``quarantine.py``.
"""
