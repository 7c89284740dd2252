"""What is known of a rank's processes from outside: how they ended, what the kernel says, where they stand.

Must not start or end a process. Begin with ``exit_evidence.py``.
"""
