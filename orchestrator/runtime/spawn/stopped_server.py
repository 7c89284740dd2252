"""Ends a fork server that is stopped (SIGSTOP, a debugger) while a request waits for its answer.

Processes that it has started continue, and the connection breaks: the caller starts another server, as after a death.
"""

from __future__ import annotations

import socket
import struct
import sys
from signal import SIGKILL
from typing import TYPE_CHECKING, Final, Self

from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.spawn.rank_remains import is_stopped, signal_process

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

LOOK_SECONDS: Final = 1.0
LOOKS: Final = 3
"""Number of checks in a row that must find the server stopped; a debugger or tracer may stop a process for a moment."""

_CREDENTIALS: Final = struct.Struct("3i")


class StoppedServerWatch:
    """Watches during one request: without a waiting request nothing is checked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._server: holder.Identity | None = None
        self._seen = 0

    def look_at(self, sock: socket.socket) -> None:
        """Watch the process that listens at the other end of ``sock``."""
        pid, _uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        self._server = holder.identity_of(pid) if pid > 1 else None
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self._server is None:
            return
        self._seen = self._seen + 1 if is_stopped(self._server.pid) else 0
        if self._seen < LOOKS:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        elif signal_process(self._server, SIGKILL):
            sys.stderr.write(f"fork server {self._server.pid} was stopped and did not answer; it was killed\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
