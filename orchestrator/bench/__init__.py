"""Single- against multi-GPU benchmark; the advisor's cost model.

Works alone: neither Ray nor a daemon. ``plan.py`` says what is measured, ``processes.py`` starts the ranks, ``rank/`` runs
inside them (the only part with torch), ``results.py`` and ``report.py`` make figures and text. Begin with ``benchmark.py``.
"""
