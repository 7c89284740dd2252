"""Stored forms: a job's record and events as JSON-ready values and back. Pure.

A change of a record's fields must keep old stored values readable. Begin with ``job_record.py``.
"""
