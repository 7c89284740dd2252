"""From the text of a job file to a `JobSpec`, and what is wrong with it: nodes with marks, `--set`, pydantic, rules between keys.

`spec.job` is its front door. Does no I/O. Begin at `reading.py`.
"""
