"""Queries the process that advises a search (``analysis.search``): one line for a query, one for the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

COMMAND: Final = (sys.executable, "-m", "orchestrator.analysis.search")
ANSWER_SECONDS: Final = 300.0
MOST_BYTES: Final = 16 * 1024 * 1024
_THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class AdvisorError(Exception):
    """The advising process has ended, or does not answer; the message has its last error line."""


class Advisor(Protocol):
    """Interface of the process that advises a search."""

    async def ask(self, trials: Sequence[Mapping[str, Any]], want: int) -> Mapping[str, Any]:
        """Return values to try, trials to end, and what trials have given. Raises AdvisorError."""
        ...


class ProcessAdvisor:
    """The process of one search."""

    def __init__(self, process: asyncio.subprocess.Process, answer_seconds: float) -> None:
        self._process = process
        self._answer_seconds = answer_seconds

    async def ask(self, trials: Sequence[Mapping[str, Any]], want: int) -> Mapping[str, Any]:
        """Return the process's answer to one question. Raises AdvisorError."""
        await self.write({"trials": list(trials), "want": want})
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._answer_seconds):
                line = await self._process.stdout.readline()
            found: Mapping[str, Any] = json.loads(line)
        except TimeoutError as error:
            raise AdvisorError(f"no answer in {self._answer_seconds:g} s") from error
        except ValueError as error:
            raise AdvisorError(await self._last_words()) from error
        return found

    async def write(self, body: Mapping[str, Any]) -> None:
        """Send one line. Raises AdvisorError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(body).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise AdvisorError(await self._last_words()) from error

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        stderr_lines = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        return stderr_lines[-1][:500] if stderr_lines else "its process ended without a message"


@contextlib.asynccontextmanager
async def process_advisor(
    space: Mapping[str, Any], *, command: Sequence[str] = COMMAND, answer_seconds: float = ANSWER_SECONDS
) -> AsyncIterator[Advisor]:
    """Start the process for a space, and end it afterwards."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **_THREADS},
        cwd="/",
        start_new_session=True,
        limit=MOST_BYTES,
    )
    try:
        advisor = ProcessAdvisor(process, answer_seconds)
        await advisor.write(space)
        yield advisor
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
