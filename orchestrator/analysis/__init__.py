"""Reports, plots, A/B comparison, time estimates: on files alone, without a daemon.

Begin with ``reading/series.py``, the one form that every file becomes. Must not import Ray, nor a driver.
"""
