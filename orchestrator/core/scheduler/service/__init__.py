"""The time that jobs are expected to need, as the order of waiting jobs and preemption use it. Begin with ``levels.py``."""
