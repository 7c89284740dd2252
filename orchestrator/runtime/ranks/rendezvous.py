"""The rendezvous socket of an attempt: bound here once, handed to the process that serves it, never let go between."""

from __future__ import annotations

import socket

_BACKLOG = 2048


def bind_rendezvous(address: str) -> socket.socket:
    """A listening socket on a free port of ``address``; the kernel chooses the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
