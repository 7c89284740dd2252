"""A job's log as a stream: what there is, then, for a follower, what comes until the job has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.api.views import LogLine
from orchestrator.runtime.logs import LogEntry, LogReader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from pathlib import Path

    from orchestrator.api.service import LogQuery

FOLLOW_SECONDS = 0.1  # how often a follower's files are looked at; nobody follows, nobody looks
BATCH_LINES = 1000


class LogStream:
    """``ended`` tells whether the job has ended, and its newest attempt."""

    def __init__(self, directory: Path, query: LogQuery, ended: Callable[[], Awaitable[tuple[bool, int]]]) -> None:
        self._directory = directory
        self._query = query
        self._ended = ended

    async def batches(self) -> AsyncGenerator[Sequence[LogLine], None]:
        """Batches of lines, oldest first."""
        query = self._query
        ended, newest = await self._ended()
        attempt = query.attempt
        if attempt is None and query.since is None and not query.follow:
            attempt = newest or None
        reader = LogReader(self._directory, attempt=attempt, rank=query.rank)
        entries = await asyncio.to_thread(reader.read)
        if attempt is None and query.since is None and query.follow:
            entries = [e for e in entries if e.attempt == newest]
        if query.since is not None:
            entries = [e for e in entries if e.at >= query.since]
        if query.tail is not None:
            entries = entries[-query.tail :] if query.tail else []
        for batch in _batches(entries):
            yield batch
        while query.follow:
            # In this order: what was written before the end is read after it was known.
            ended, _ = await self._ended()
            for batch in _batches(await asyncio.to_thread(reader.read)):
                yield batch
            if ended:
                return
            await asyncio.sleep(FOLLOW_SECONDS)


def _batches(entries: Sequence[LogEntry]) -> list[list[LogLine]]:
    lines = [LogLine(at=e.at, attempt=e.attempt, rank=e.rank, stream=e.stream, text=e.text) for e in entries]
    return [lines[i : i + BATCH_LINES] for i in range(0, len(lines), BATCH_LINES)]
