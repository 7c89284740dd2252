"""Training from start to end: epochs, validation, checkpoints, recovery, reports.

The top of the training system. Begin with ``manager.py``.
"""
