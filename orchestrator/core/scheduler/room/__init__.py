"""What is free on the nodes, and which jobs hold the rest, kept up to date by each change. Begin with ``vacancy.py``."""
