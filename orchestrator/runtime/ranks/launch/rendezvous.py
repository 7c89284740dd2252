"""The rendezvous of an attempt: its socket is bound once, and passed open to the process that serves it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from orchestrator.runtime.ranks.launch.start import RankStarter
    from orchestrator.runtime.spawn.lifeline import Lifeline

_BACKLOG = 2048
_OLD_STORE_SECONDS: Final = 1.0


def bind_rendezvous(address: str) -> socket.socket:
    """Bind a listening socket to a free port of ``address``; the kernel chooses the port."""
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
    """The socket of the current attempt, and the lifeline of its server process. Only rank 0 has them."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._store: Lifeline | None = None
        self.retiring = False
        """Whether the store of an earlier attempt was left to be closed later."""

    @property
    def port(self) -> int | None:
        """The port, if this rank serves one."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def bind(self, address: str) -> None:
        """Bind the attempt's socket."""
        self._listener = bind_rendezvous(address)

    async def serve(self, starter: RankStarter) -> None:
        """Start the process that serves the socket, once. Ranks that connect before it wait in the socket's backlog."""
        if self._listener is not None and self._store is None:
            store = await starter.store(self._listener)
            self._store = None if store is None else store.lifeline

    def retire(self) -> None:
        """Close the old store a little later: its end takes some ten milliseconds of a core, which the new attempt needs."""
        if self._store is not None:
            asyncio.get_running_loop().call_later(_OLD_STORE_SECONDS, self._store.close)
            self._store, self.retiring = None, True

    def close(self) -> None:
        """End the process that serves the socket, and close the socket."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
