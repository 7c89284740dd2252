"""The scheduler: ``decide(state, now) -> commands``, placement and elastic sizes. Pure.

Begin with ``scheduler.py``.
"""
