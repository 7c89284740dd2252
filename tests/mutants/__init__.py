"""Seeded bugs of the fold, the loop, the stores, the gangs and the scheduler, and the test that catches each: ``python -m tests.mutants``.

``seeded.py`` has the bugs, ``caught.json`` the tests that caught each. The tests of the part, the fastest, are run first; then the simulation and the stateful tests.
"""
