"""The Ray cluster below the daemon: an embedded head, or an existing cluster; its nodes, capacity and idle workers.

Must not know jobs or attempts. Begin with ``cluster.py``.
"""
