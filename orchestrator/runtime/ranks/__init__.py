"""One rank and its actor: its process, output, log, progress page, evidence of its end.

Must not know other ranks or the job's record, except for ``launch_spec.py``, which makes the plans. Begin with
``rank_actor.py``.
"""
