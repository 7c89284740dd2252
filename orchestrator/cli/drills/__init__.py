"""Drills: inject a fault into a running job and report the recovery.

Work from outside, by signals and files; the daemon has no part in them. Begin with ``drills.py``.
"""
