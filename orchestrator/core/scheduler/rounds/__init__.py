"""One round of placing: what it looks at, and the jobs of it that find too little free. Begin with ``round.py``."""
