"""What a rank's start needs: room for its record, the rendezvous of its attempt, its process from the fork server.

Must not know what became of an earlier attempt. Begin with ``start.py``.
"""
