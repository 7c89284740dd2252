# ruff: noqa: D102 - SessionChannel documents the methods
"""A session that answers with what it is sent: for tests of the routes, the client and the command line."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from orchestrator.runtime.ranks.sessions.messages import EndReason, SessionEnd, SessionOutput

FAIL = b"fail\n"
"""The command ends with code 3 when it reads this line."""


class FakeSession:
    """Echoes input; a signal, a size and the end of input become output, too. It ends with code 0 at the end of its input."""

    def __init__(self) -> None:
        self._out: asyncio.Queue[SessionOutput] = asyncio.Queue(8)
        self.closed = False

    async def read(self, seconds: float) -> SessionOutput:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._out.get()
        return SessionOutput()

    async def write(self, data: bytes | None) -> None:
        if data is None or data == FAIL:
            code = 0 if data is None else 3
            await self._out.put(SessionOutput(end=SessionEnd(reason=EndReason.EXITED, exit_code=code)))
        else:
            await self._out.put(SessionOutput(stdout=data))

    async def resize(self, rows: int, columns: int) -> None:
        await self._out.put(SessionOutput(stderr=f"{rows}x{columns}\n".encode()))

    async def signal(self, number: int) -> None:
        await self._out.put(SessionOutput(end=SessionEnd(reason=EndReason.EXITED, signal=number)))

    async def close(self) -> None:
        self.closed = True
