"""Figures: values over windows of time, computed from a job's observations."""
