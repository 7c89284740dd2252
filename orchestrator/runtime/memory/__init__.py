"""In-memory runtime: nodes, GPUs, gangs and ranks as values; time is an argument, faults are data.

It does for jobs' records what ``runtime.gangs`` does on Ray, without Ray, threads, processes or waiting, so that tests and
simulations drive the production loop and service on it: thousands of jobs a second, the same result every time. Must not
decide anything, nor know the store. Begin with ``cluster.py`` (what there is, and what outlives the daemon) and ``gangs.py``
(the daemon's side, which a crash forgets); ``faults.py`` lists what can go wrong.
"""
