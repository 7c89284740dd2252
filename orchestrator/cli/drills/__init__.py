"""Drills: inject a fault into a running job and report the recovery.

Work from outside, by signals and files; the daemon is not involved. Begin with ``drills.py``.
"""
