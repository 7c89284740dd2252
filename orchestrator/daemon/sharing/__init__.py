"""How GPUs are shared between queues and users: what decisions are given, and which submissions are refused.

Begin with ``book.py``. The rules are ``core/scheduler/``; this package only feeds them.
"""
