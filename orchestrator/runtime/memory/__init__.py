"""In-memory runtime: nodes, GPUs, gangs and ranks as values; time is an argument, faults are data.

It does for jobs' records what ``runtime.gangs`` does on Ray, without Ray, threads, processes or waiting, so that tests
and simulations drive the production loop and service on it: thousands of jobs a second, with the same result every
time. Must not decide anything, nor use the store. Begin with ``cluster.py`` (the state that outlives the daemon) and
``gangs.py`` (the daemon's side, which a crash discards); ``faults.py`` lists the possible faults.
"""
