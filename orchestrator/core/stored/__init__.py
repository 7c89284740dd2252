"""Stored forms: a job's record and its events as JSON-ready values and back, also as earlier versions have written them. Pure.

A change of a record's fields must not change what is stored without a form for the old one. Begin with ``job_record.py``.
"""
