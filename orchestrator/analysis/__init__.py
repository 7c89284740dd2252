"""Reports, plots, A/B comparison, time estimates: on files alone, without a daemon.

Begin with ``reading/series.py``, the common form of every file. Must not import Ray, nor a driver.
"""
