"""Jobs in the daemon: submission, working directory archives, progress, hangs, logs, checkpoints, views.

Begin with ``submission.py``.
"""
