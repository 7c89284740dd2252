"""One rank and its supervisor: its process, output, log, progress page, evidence of its end.

Must not know other ranks or the job's record. Begin with ``supervisor.py``; ``actor.py`` is the Ray actor around it.
"""
