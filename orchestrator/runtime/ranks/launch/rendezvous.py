"""The rendezvous of an attempt: its socket is bound once, handed to the process that serves it, never let go between."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from orchestrator.runtime.ranks.launch.start import RankStarter
    from orchestrator.runtime.spawn.client import Lifeline

_BACKLOG = 2048
_OLD_STORE_SECONDS: Final = 1.0


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


class Rendezvous:
    """The socket of the current attempt, and the lifeline of the process that serves it. Ranks but 0 have neither."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._store: Lifeline | None = None

    @property
    def port(self) -> int | None:
        """The port, where this rank serves one."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def bind(self, address: str) -> None:
        """Bind the attempt's socket."""
        self._listener = bind_rendezvous(address)

    async def serve(self, starter: RankStarter) -> None:
        """Start what serves the socket, once. Ranks that are there before it wait in the socket's backlog."""
        if self._listener is not None and self._store is None:
            store = await starter.store(self._listener)
            self._store = None if store is None else store.lifeline

    def retire(self) -> None:
        """Another attempt begins. The store's end takes a core some ten milliseconds, which the new attempt needs more."""
        if self._store is not None:
            asyncio.get_running_loop().call_later(_OLD_STORE_SECONDS, self._store.close)
            self._store = None

    def close(self) -> None:
        """End what serves the socket, and let the socket go."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
