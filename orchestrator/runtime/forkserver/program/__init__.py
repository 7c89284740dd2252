"""The training process up to the user's code: a forked process that behaves as a fresh interpreter would.

Must not know keepers or the server's loop. Begin with ``launch.py``.
"""
