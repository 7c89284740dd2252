"""Keeps the actors of a gang that ended for the next gang like it. Which gang serves which job is in ``parked_gangs.py``.

Owns no decision about a job: where nothing is parked, or a parked gang does not answer, a gang is created as always.
"""
