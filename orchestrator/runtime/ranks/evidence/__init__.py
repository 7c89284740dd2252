"""Evidence about a rank's processes from outside: how they ended, what the kernel reports, what they are doing.

Must not start or end a process. Begin with ``exit_evidence.py``.
"""
