"""Deterministic simulation of the daemon: ``python -m tests.simulation run`` and ``... replay SEED``.

One seed gives one history: requests of users, events on the nodes, faults, and kills of the daemon. The loop, the service, the
fold and the stores are the production ones, on the in-memory runtime. ``history.py`` draws the steps,
``acts.py`` carries them out on a ``world.py``, ``invariants.py`` checks the world after each; ``campaign.py`` runs many seeds.
"""
