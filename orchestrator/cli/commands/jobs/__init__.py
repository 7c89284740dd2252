"""Commands for jobs, one or several at once: which jobs are meant, and what to do to each. Begin at `selecting.py`."""
