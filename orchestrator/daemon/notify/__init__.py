"""Web hooks: due notices and how they are sent.

Begin with ``notifier.py``.
"""
