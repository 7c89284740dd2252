"""Bootstrap (which alone chooses implementations), the assembly of the daemon's parts, the loop and the service.

No part takes the whole daemon. Begin with ``assembly.py``, then ``loop.py``.
"""
