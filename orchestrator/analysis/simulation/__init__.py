"""What a simulation needs around its pure core: traces from files, synthetic ones, comparison, pictures.

Begin with ``comparison.py``. A trace becomes ``core.simulation.trace.TraceJob`` in ``reading.py`` alone.
"""
