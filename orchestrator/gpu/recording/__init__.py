"""Recordings of GPUs: written, read back, summarized, plotted and compared.

Must not import drivers. Begin with ``recorder.py``.
"""
