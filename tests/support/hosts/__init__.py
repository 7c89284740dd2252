"""Several hosts on one machine: each has a network, a process table, a hostname, a disk and a user of its own.

Tests use ``hosts.py``. It starts ``site.py``, which makes the namespaces, starts ``init.py`` as the first process of each host,
and carries frames between them (``switch.py``): with delay, loss, reordering and cuts. ``cluster.py`` puts a Ray cluster and a daemon on
them. Every process is a child of the site and in its namespaces: when the site ends, nothing is left.
"""
