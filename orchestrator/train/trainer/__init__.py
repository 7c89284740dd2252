"""The training system: configuration, data, engine, measurements and loop of ``MultiGPUTrainer``.

Builds on ``train.script``, which must not import it. Begin with ``loop/manager.py``.
"""
