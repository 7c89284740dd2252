"""The checkpoint format: values to bytes and back, manifests, file names.

Must not open a checkpoint directory. Begin with ``codec.py``.
"""
