"""Stored forms: a job's record and events as JSON-ready values and back, also as written by earlier versions. Pure.

A change of a record's fields must keep old stored values readable. Begin with ``job_record.py``.
"""
