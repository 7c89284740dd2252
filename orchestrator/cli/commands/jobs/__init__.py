"""Commands for jobs, one or several at once: the choice of jobs, and the action on each. Begin with `selecting.py`."""
