"""What a rank prints: taken into its log, searched for progress and for the patterns of log policies, read again.

Must not decide what follows. Begin with ``output.py``.
"""
