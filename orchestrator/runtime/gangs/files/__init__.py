"""The daemon's side of jobs' files on nodes that do not share its home: working copies out, logs, exits and outputs back.

Decides nothing about a job. Begin with ``job_files.py``.
"""
