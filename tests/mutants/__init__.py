"""Seeded bugs of the fold, the loop, the stores, the gangs and the scheduler, and the test that catches each: ``python -m tests.mutants``.

``seeded.py`` has the bugs, ``caught.json`` what caught each. The tests of the part are run first, which take the least time; then the simulation, then the stateful tests.
"""
