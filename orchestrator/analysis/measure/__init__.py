"""Statistics of a run: means over time, energy, load balance, and what they have to do with speed. No files, no plots."""
