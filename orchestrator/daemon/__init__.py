"""Bootstrap (which alone chooses implementations, and assembles the daemon's parts), the loop and the service.

No part takes the whole daemon. Begin with ``bootstrap.py``, then ``loop.py``.
"""
