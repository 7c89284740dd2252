"""GPU drivers behind one port (``gpu.reader``): NVIDIA, AMD, Intel and simulated GPUs, and their discovery.

Must not aggregate or publish. Begin with ``inventory.py``.
"""
