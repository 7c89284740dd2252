"""Statistics of a run: means over time, energy, load balance, and their relation to speed. No files, no plots."""
