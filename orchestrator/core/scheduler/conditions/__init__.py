"""What jobs wait for beside room: other jobs, a start time, a place in their matrix. ``release.py`` is the entry point of decisions."""
