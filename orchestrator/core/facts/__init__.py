"""Typed facts: created by sensors, carried by events, kept by the store, returned by the API, matched by policies.

A fact's class has its fields, its sentence and its advice; the fields hold no sentence of orch. Begin with ``fact.py``; ``codec.py``
has the list of all of them.
"""
