"""The embedded Ray head: its start, its processes, which outlive the daemon, and its end.

Must not query Ray about nodes or actors. Begin with ``embedded.py``.
"""
