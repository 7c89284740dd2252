"""Snapshots: a rank's state in shared memory, written beside training and read after a death.

Must not write to storage. Begin with ``writer.py``.
"""
