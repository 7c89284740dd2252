"""`orch bench --nccl-sweep`: finds the NCCL settings that make all-reduces of this machine faster, and changes none.

``settings.py`` lists the candidates for a topology, ``sweep.py`` tries them, ``measuring.py`` times all-reduces with real ranks.
"""
