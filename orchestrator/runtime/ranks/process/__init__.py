"""One process of a rank, followed from its start to the end of its tree.

Must not know attempts other than its own. Begin with ``rank_process.py``.
"""
