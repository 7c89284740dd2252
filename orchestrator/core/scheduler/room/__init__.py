"""Free resources of the nodes, and the jobs that hold the rest, updated with each change. Begin with ``vacancy.py``."""
