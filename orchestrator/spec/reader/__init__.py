"""Converts the text of a job file to a `JobSpec` with its errors: nodes with marks, `--set`, pydantic, rules between keys.

`spec.job` is its interface. Does no I/O but for `schema_file.py`. Begin with `reading.py`.
"""
