"""The HTTP application: gate, routes, bodies, streams, listeners, and an in-memory service for tests.

Must not import the daemon. Begin with ``app.py``.
"""
