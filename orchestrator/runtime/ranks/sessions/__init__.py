"""Sessions beside a running rank: commands with or without a terminal, and connections to its ports.

Owned by the rank's actor; they end with the rank, with their client, or when polling stops. Begin with ``sessions.py``.
"""
