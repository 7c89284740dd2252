"""The scheduler: ``decide(state, now) -> commands``, placement and elastic sizes. Pure.

Begin with ``scheduler.py``, and with ``docs/queues.md``, which has the whole policy on a page. ``live_jobs.py`` is what a
decision reads; ``order.py``, ``durations.py`` and ``shares.py`` say which job is next, ``placement.py`` where it fits,
``preemption.py`` what happens if it does not, and ``outlook.py`` when it will.
"""
