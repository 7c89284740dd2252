"""GPU drivers behind one port (``GpuReader`` in ``gpu.sample``): NVIDIA, AMD, Intel and simulated GPUs, and their discovery.

Must not aggregate or publish. Begin with ``inventory.py``.
"""
