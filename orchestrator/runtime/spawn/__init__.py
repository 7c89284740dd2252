"""Client of the fork server: requests for processes, their environment, and their lifelines.

Imports neither Ray nor torch. Begin with ``client.py``.
"""
