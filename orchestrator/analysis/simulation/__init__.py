"""The surroundings of a simulation's pure core: traces from files, synthetic ones, comparison, charts.

Begin with ``comparison.py``. Only ``reading.py`` creates ``core.simulation.trace.TraceJob`` from a trace.
"""
