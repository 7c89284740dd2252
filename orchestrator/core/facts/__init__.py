"""What is known, typed: the records that sensors make, events carry, the store keeps, the API answers with, policies match on.

No fact holds an English sentence of ours: ``core.sentences`` makes them, at the edge. Begin with ``fact.py``; ``codec.py``
has the list of all of them.
"""
