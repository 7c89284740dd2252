"""The Ray cluster that the daemon uses: an embedded head or an existing cluster, with its nodes, capacity and idle workers.

Must not depend on jobs or attempts. Begin with ``cluster.py``.
"""
