"""The life cycle of one job: how its events change the record, and what follows from the record alone. Pure.

``scheduler`` considers other jobs and nodes. Begin with ``fold.py`` (events to record), then ``advance.py`` (record to
events, and to the runtime's orders) and ``failure.py`` (why an attempt failed, whether it is retried).
"""
