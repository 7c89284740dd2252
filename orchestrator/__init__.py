"""orch: runs training jobs on the GPUs of one machine or of a Ray cluster."""

__version__ = "0.1.0"
