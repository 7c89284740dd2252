# ruff: noqa: D102 - SessionChannel documents the methods
"""A session that echoes its input: for tests of the routes, the client and the command line."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import RefusedError
from orchestrator.runtime.ranks.sessions.messages import (
    EndOfInput,
    EndReason,
    Input,
    SessionEnd,
    SessionMessage,
    SessionOutput,
    SessionRequest,
    Signal,
    Size,
)

if TYPE_CHECKING:
    from orchestrator.api.service import Caller, SessionChannel
    from orchestrator.api.views import JobView
    from orchestrator.core.ids import JobId

FAIL = b"fail\n"
"""The command ends with code 3 when it reads this line."""


class FakeSession:
    """Echoes input; writes a new size to standard error; ends with code 0 at the end of input, or by a signal."""

    def __init__(self) -> None:
        self._out: asyncio.Queue[SessionOutput] = asyncio.Queue(8)
        self.closed = False

    async def read(self, seconds: float) -> SessionOutput:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._out.get()
        return SessionOutput()

    async def send(self, message: SessionMessage) -> None:
        match message:
            case Input(data=data) if data != FAIL:
                await self._out.put(SessionOutput(stdout=data))
            case Input():
                await self._end(exit_code=3)
            case EndOfInput():
                await self._end(exit_code=0)
            case Size(rows=rows, columns=columns):
                await self._out.put(SessionOutput(stderr=f"{rows}x{columns}\n".encode()))
            case Signal(number=number):
                await self._end(signal=number)

    async def _end(self, *, exit_code: int | None = None, signal: int | None = None) -> None:
        end = SessionEnd(reason=EndReason.EXITED, exit_code=exit_code, signal=signal)
        await self._out.put(SessionOutput(end=end))

    async def close(self) -> None:
        self.closed = True


class FakeSessions:
    """The part of the fake service that opens sessions."""

    _jobs: dict[JobId, JobView]
    calls: list[tuple[str, Any]]

    async def open_session(self, job_id: JobId, rank: int, request: SessionRequest, caller: Caller) -> SessionChannel:
        if self._jobs[job_id].state != "RUNNING":
            raise RefusedError(f"{job_id} does not run")
        self.calls.append(("session", (rank, request, caller.user)))
        return FakeSession()
