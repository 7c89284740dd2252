"""Gangs: the placement group and rank actors of a job. Carries out effects and reports results as events.

Decides nothing: ``core.scheduler`` does. Begin with ``gangs.py``.
"""
