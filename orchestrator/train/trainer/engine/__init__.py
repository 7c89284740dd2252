"""One training step on any number of ranks: strategies, precision, finite checks, memory errors.

Must not depend on epochs or checkpoints. Begin with ``trainer.py``.
"""
