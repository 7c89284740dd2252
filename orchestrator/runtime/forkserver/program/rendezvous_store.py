"""Runs T as a rendezvous store: a TCPStore per attempt, on a socket that its caller bound.

The caller binds the port once and hands it over: it is never free in between, so no other process can take it.
"""

from __future__ import annotations

import datetime as dt
import importlib
import signal
import socket

# Longest wait of a client for a key; the ranks' own timeouts are shorter, and their messages say more.
_TIMEOUT = dt.timedelta(days=1)


def serve(listen_fd: int) -> None:
    """Serve until the process is killed; raise when the socket or this interpreter's torch is unsuitable."""
    distributed = importlib.import_module("torch.distributed")
    with socket.socket(fileno=listen_fd) as listener:
        host, port = listener.getsockname()[:2]
        listener.detach()  # the store owns it from here
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - bound by the caller
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
