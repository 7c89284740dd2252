"""Whether diagnosis names the right cause, the right rank and GPU, soon, and nothing on healthy jobs: see ``run.py``."""
