"""Copies a job's records into experiment trackers, from a process of its own. Works on files alone.

Begin with ``process.py``, which also defines the interface of a tracker's library (one module for each); ``records.py`` reads what the job
recorded, ``journal.py`` keeps the progress of the copy.
"""
