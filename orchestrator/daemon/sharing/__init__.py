"""Sharing of GPUs between queues and users: the input of decisions, and the refusal of submissions.

Begin with ``book.py``. The rules are ``core/scheduler/``; this package only supplies their input.
"""
