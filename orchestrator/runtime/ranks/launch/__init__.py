"""Prepares and starts a rank: space for its exit record, the rendezvous of its attempt, its process from the fork server.

Must not know the outcome of an earlier attempt. Begin with ``start.py``.
"""
