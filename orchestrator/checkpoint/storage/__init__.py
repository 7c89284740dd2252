"""Files of a checkpoint directory: written, committed, read, verified, fenced, removed; local or behind a URL.

Must not choose what to resume from. Begin with ``storage.py``.
"""
