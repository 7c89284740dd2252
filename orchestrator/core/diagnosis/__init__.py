"""What is wrong with jobs, ranks, nodes and GPUs, judged from observations. Pure.

Begin with ``health.py``.
"""
