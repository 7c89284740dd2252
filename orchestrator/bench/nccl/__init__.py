"""`orch bench --nccl-sweep`: which NCCL settings make all-reduces of this machine faster. It reports, and sets nothing.

``settings.py`` says what is tried for a topology, ``sweep.py`` tries it, ``measuring.py`` is the port with real ranks behind it.
"""
