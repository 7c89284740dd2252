"""Accepts connections for one listener: up to a limit, and none while the process has no free descriptors.

Connections over the limit wait in the kernel's queue. asyncio's own server has no limit and, without descriptors,
retries for each entry of that queue, with a traceback for each.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

RETRY_SECONDS: Final = 1.0
BATCH: Final = 64
HANDSHAKE_SECONDS: Final = 10.0
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def _unreported(_error: OSError | None) -> None:
    """No-op default."""


def _admitted(_connection: socket.socket) -> bool:
    """Admit every connection."""
    return True


class Acceptor:
    """Serves ``sock``, which already listens, until ``close``. Created and used in the event loop's thread.

    A connection that ``admit`` does not admit is closed at once, at the cost of a system call. ``make`` returns the protocol of a new connection; its argument is a function that the protocol must call once, in
    its ``connection_lost``. ``on_pause`` is called at each pause: with the error, or None for the limit. Without
    descriptors, it accepts again after ``retry_seconds``.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        *,
        cap: int,
        tls: ssl.SSLContext | None = None,
        admit: Callable[[socket.socket], bool] = _admitted,
        on_pause: Callable[[OSError | None], None] = _unreported,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.sock = sock
        self._make = make
        self._cap = cap
        self._tls = tls
        self._admit = admit
        self._on_pause = on_pause
        self._retry_seconds = retry_seconds
        self._open = 0
        self._listening = self._closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting; existing connections continue."""
        self._pause()
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self.sock.close()

    async def wait_closed(self) -> None:
        """Return when connections that were being opened are served or have failed."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _resume(self) -> None:
        if not self._listening and not self._closed:
            self._loop.add_reader(self.sock, self._accept)
            self._listening = True

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._listening:
            self._loop.remove_reader(self.sock)
            self._listening = False

    def _accept(self) -> None:
        for _ in range(BATCH):
            if self._open >= self._cap:
                self._pause()
                self._on_pause(None)
                return
            try:
                connection, _ = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause()
                self._retry = self._loop.call_later(self._retry_seconds, self._resume)
                self._on_pause(error)
                return
            if not self._admit(connection):
                connection.close()
                continue
            connection.setblocking(False)
            self._open += 1
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._open -= 1
                self._resume()

        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(release),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None,
            )
        except (OSError, asyncio.CancelledError):
            connection.close()
            release()  # a failed handshake: there is no protocol to report its end
