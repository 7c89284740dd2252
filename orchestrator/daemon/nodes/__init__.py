"""Nodes in the daemon: kept current, warmed, checked, cordoned; the head of an embedded cluster restarted.

Each part has few collaborators, passed to its constructor. Begin with ``care.py``, then ``quarantine.py``.
"""
