"""Nodes as the daemon sees them: kept current, warmed, checked, cordoned; the head of an embedded cluster started again.

Each part has few collaborators and takes them in its constructor. Begin with ``care.py``, then ``quarantine.py``.
"""
