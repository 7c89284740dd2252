"""Settings of a training run: one frozen record from Python, YAML or the command line, checked as a whole.

Imports no torch. Begin with ``config.py``.
"""
