"""The client's transport: endpoint, HTTP over a socket, submission with an idempotency key, reconnection.

Imports little: every command loads it. Begin with ``wire.py``.
"""
