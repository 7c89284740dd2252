"""Code that runs inside a rank of the benchmark: models, steps, and the measurement of their communication.

Must not decide what is measured, nor write files. Begin with ``main.py``.
"""
