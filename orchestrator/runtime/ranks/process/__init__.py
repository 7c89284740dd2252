"""One process of a rank, followed from its start to the end of its tree.

Must not know attempts beside its own. Begin with ``rank_process.py``.
"""
