"""Jobs as the daemon handles them: submission, working directory archives, progress, hangs, logs, checkpoints, views.

Begin with ``submission.py``.
"""
