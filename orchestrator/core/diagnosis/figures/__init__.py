"""Figures: what observations of a job say over windows of time."""
