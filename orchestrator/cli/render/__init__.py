"""Views for people: tables, job details, GPUs, units. Values in, text out.

Must not ask the daemon or decide. Begin with ``table.py``.
"""
