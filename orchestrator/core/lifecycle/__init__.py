"""The life of one job: what its events make of the record, and what follows from the record alone. Pure.

Other jobs and nodes are for ``scheduler`` to weigh. Begin with ``fold.py`` (events to record), then ``advance.py`` (record to
events), ``effects.py`` (record to what the runtime must do) and ``failure.py`` (why an attempt failed, whether it is retried).
"""
