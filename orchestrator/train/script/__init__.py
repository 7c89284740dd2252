"""The training script's side of orch: rank, progress page, report, save, load, stop, and the elastic share of a batch.

Works without Ray and under plain ``python`` or ``torchrun``. Begin with ``training_context.py``.
"""
