"""A job's record as values: what was submitted, its phase, its attempts and its checkpoints. Pure.

Nothing here decides or changes a job: ``lifecycle`` does. ``record.py`` has it all.
"""
