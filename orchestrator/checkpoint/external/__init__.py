"""Checkpoints that a script writes by itself: found, verified, registered, retained.

Must not change the script's files. Begin with ``external_checkpoints.py``.
"""
