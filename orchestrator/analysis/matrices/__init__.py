"""Figures, charts and files about the runs of a matrix: by configuration, over all its runs."""
