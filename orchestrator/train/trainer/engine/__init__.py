"""One training step on any number of ranks: strategies, precision, finite checks, memory errors.

Must not know epochs or checkpoints. Begin with ``trainer.py``.
"""
