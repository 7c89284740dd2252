"""One node: its agent, its directories, the files of its jobs, its health check, and what Ray reports about it.

Must not depend on gangs. Begin with ``agent.py``.
"""
