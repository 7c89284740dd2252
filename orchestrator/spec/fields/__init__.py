"""The kinds of values that keys of job.yaml have: how each is read from its node, written and described, for pydantic.

Depends on no key and reads no text. Imports pydantic only for a schema. Begin with `kinds.py`.
"""
