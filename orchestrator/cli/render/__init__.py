"""Views for users: tables, job details, GPUs, units. Values in, text out.

Must not query the daemon or decide. Begin with ``table.py``.
"""
