"""A rank's output: written to its log, searched for progress and for the patterns of log policies, read again.

Must not decide what follows from it. Begin with ``output.py``.
"""
