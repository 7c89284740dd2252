"""Seeded bugs of the fold, the loop, the stores, the gangs and the scheduler, and what catches each: ``python -m tests.mutants``.

``seeded.py`` has the bugs, ``caught.json`` what caught each. The simulation hunts first; then come the tests of the part and the stateful ones.
"""
