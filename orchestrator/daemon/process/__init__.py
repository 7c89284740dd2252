"""The daemon as a process: start, serve, doctor, demo.

Begin with ``serve.py``.
"""
