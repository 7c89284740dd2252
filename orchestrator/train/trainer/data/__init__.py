"""Data of a training run: batches, samplers, loaders, and their position within an epoch.

Must not import the engine or the loop. Begin with ``loading.py``.
"""
