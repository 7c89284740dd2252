"""Pure: ids, states, events, a job's record and life cycle, the scheduler. No I/O, no clock, no randomness.

Sub-packages, each importing only those after it: ``scheduler``, ``lifecycle``, ``diagnosis``, ``job``, ``facts``.
Begin with ``states.py`` and ``lifecycle/fold.py``.
"""
