"""Keeps an ended gang's actors for the next gang of its shape; ``parked_gangs.py`` records which gang serves which job.

Decides nothing about a job: where nothing is parked, or a parked gang does not answer, a gang is created as always.
"""
