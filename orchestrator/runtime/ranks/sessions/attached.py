"""A client at a rank's terminal. When it leaves, the rank continues; when the rank ends, it gets the rank's exit."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.ranks.sessions.messages import (
    READ_BYTES,
    AttachRequest,
    EndReason,
    SessionEnd,
    SessionOutput,
    SessionRefusedError,
    Terminal,
)

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.runtime.ranks.sessions.rank_terminal import RankTerminal

_LEFT_OUT: Final = b"\r\n[orch] output was left out: this client reads too slowly\r\n"


class AttachSession:
    """Input to, and output from, a rank's terminal. If a slow client leaves too much output unread, the oldest is dropped."""

    def __init__(self, terminal: RankTerminal, request: AttachRequest) -> None:
        self._terminal, self._kind = terminal, "" if request.terminal is None else request.terminal.kind
        self._news = asyncio.Event()
        self._end: SessionEnd | None = None
        if request.terminal is not None:
            terminal.resize(request.terminal)
        self._data = bytearray(terminal.attach(self._take))

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for at most ``seconds`` until there is some."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._data and self._end is None:
                    self._news.clear()
                    await self._news.wait()
        data = bytes(self._data)
        self._data.clear()
        return SessionOutput(stdout=data, end=self._end)

    async def write(self, data: bytes) -> None:
        """Write input to the terminal."""
        await self._terminal.write(data)

    async def end_input(self) -> None:
        """End the input."""
        await self._terminal.end_input()

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size."""
        if self._kind:
            self._terminal.resize(Terminal(rows=rows, columns=columns, kind=self._kind))

    def signal(self, number: int) -> None:
        """Do nothing: a terminal turns keys into signals, and a client that leaves does not end the rank."""

    def finish(self, exited: Exit | None) -> None:
        """End the session with the exit of the rank."""
        code, signal = (None, None) if exited is None else (exited.exit_code, exited.signal)
        self._over(SessionEnd(reason=EndReason.EXITED, exit_code=code, signal=signal))

    async def close(self, reason: EndReason) -> None:
        """Detach from the terminal, and end the session."""
        self._over(SessionEnd(reason=reason))

    def _over(self, end: SessionEnd) -> None:
        self._terminal.detach(self._take)
        self._end = self._end or end
        self._news.set()

    def _take(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > READ_BYTES:
            self._data[: len(self._data) - READ_BYTES // 2] = _LEFT_OUT
        self._news.set()


def attach(terminal: RankTerminal | None, request: AttachRequest, *, has_secrets: bool) -> AttachSession:
    """Attach to a rank's terminal. Raises SessionRefusedError."""
    if terminal is None:
        raise SessionRefusedError("the rank has no terminal: its node could not open one", "its log says why")
    if has_secrets and not request.secrets:
        raise SessionRefusedError("the rank has secrets of its user, which its terminal could show", "ask its user")
    return AttachSession(terminal, request)
