"""Checks that diagnosis soon names the right cause, rank and GPU, and nothing on healthy jobs: see ``run.py``."""
