"""How many ranks pay, predicted from a few steps on one rank and from what the machine's links can do.

Must not run whole benchmarks: ``orch bench`` does. Begin with ``cost_model.py``.
"""
