"""Deterministic simulation of the daemon: ``python -m tests.simulation run`` and ``... replay SEED``.

One seed gives one history: what users ask for, what happens on the nodes, what goes wrong, and where the daemon is killed. The
loop, the service, the fold and the stores are the production ones, on the in-memory runtime. ``history.py`` draws the steps,
``acts.py`` carries them out on a ``world.py``, ``invariants.py`` says what must hold after each; ``campaign.py`` runs many seeds.
"""
