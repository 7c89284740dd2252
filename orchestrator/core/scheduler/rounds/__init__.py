"""One round of placing: its input, and the jobs for which it finds too little free. Begin with ``round.py``."""
