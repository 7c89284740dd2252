"""A simulation of the queue: discrete events through the scheduler that the daemon uses. Pure.

Begin with ``engine.py``. It may not decide anything itself: where gangs go, what waits and what is preempted is for ``scheduler``.
"""
