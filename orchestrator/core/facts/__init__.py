"""Typed facts: created by sensors, carried by events, kept by the store, returned by the API, matched by policies.

No fact holds an English sentence of orch: ``core.sentences`` creates them for output. Begin with ``fact.py``; ``codec.py``
has the list of all of them.
"""
