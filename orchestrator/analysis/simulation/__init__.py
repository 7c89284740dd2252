"""Input and output for the pure core of a simulation: traces from files, synthetic ones, comparison, charts.

Begin with ``comparison.py``. Only ``reading.py`` creates ``core.simulation.TraceJob`` from a trace.
"""
