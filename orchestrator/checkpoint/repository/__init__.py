"""The checkpoint repository of one job: save, load, list, retain; persists snapshots; chooses what to resume from.

Begin with ``repository.py``.
"""
