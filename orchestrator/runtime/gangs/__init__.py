"""Gangs: placement group and rank actors of a job; carries out effects and reports what happens as events.

Decides nothing: ``core.scheduler`` does. Begin with ``gangs.py``.
"""
