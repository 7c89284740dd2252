"""T as a rendezvous store: a TCPStore of its own for each attempt, on a socket that its caller bound.

The port is bound once, by the caller, and handed over: it is never free in between, so no other process can take it.
"""

from __future__ import annotations

import datetime as dt
import importlib
import signal
import socket

# How long a client may wait for a key; the ranks' own timeouts are shorter and say more.
_TIMEOUT = dt.timedelta(days=1)


def serve(listen_fd: int) -> None:
    """Serves until the process is killed; raises when the socket or this interpreter's torch is not fit for it."""
    distributed = importlib.import_module("torch.distributed")
    with socket.socket(fileno=listen_fd) as listener:
        host, port = listener.getsockname()[:2]
        listener.detach()  # the store owns it from here
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what the caller bound, not what we bind
    store = distributed.TCPStore(
        wildcards.get(host, host),
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    while store is not None:
        signal.pause()
