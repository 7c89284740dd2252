"""NVIDIA GPUs through NVML.

Must not be imported by other drivers. Begin with ``nvml.py``.
"""
