"""Converts launch lines and batch scripts of other systems to job.yaml.

`command.py` reads one shell line, `batch_script.py` a Slurm script; `options.py` has the advice for each launcher's options. What cannot be
carried over is named in a remark, never dropped silently. Pure: must not read files. Begin with ``command.py``.
"""
