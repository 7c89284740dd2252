"""Web hooks: due notices and their delivery.

Begin with ``notifier.py``.
"""
