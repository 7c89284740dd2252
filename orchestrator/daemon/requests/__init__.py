"""Requests of the API about jobs, one part per kind; ``daemon/bootstrap.py`` combines them.

Each part takes the loop, the store and functions; none has the cluster. Begin with ``submissions.py``.
"""
