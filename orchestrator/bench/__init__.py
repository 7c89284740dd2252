"""Single- against multi-GPU benchmark; the advisor's cost model.

Needs neither Ray nor a daemon. ``plan.py`` defines what is measured, ``processes.py`` starts the ranks, ``rank/`` runs
inside them (the only part with torch), ``results.py`` and ``report.py`` produce figures and text. Begin with
``benchmark.py``.
"""
