"""Pure: ids, states, events, the record of a job and its life, the scheduler. No I/O, no clock, no randomness.

Sub-packages, each importing only those after it: ``stored``, ``scheduler``, ``lifecycle``, ``sentences``, ``diagnosis``, ``job``, ``facts``.
Begin with ``states.py`` and ``lifecycle/fold.py``.
"""
