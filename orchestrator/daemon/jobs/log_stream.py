"""A job's log as a stream: the existing lines, then, for a follower, new lines until the job has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.api.views import LogLine
from orchestrator.runtime.ranks.logs import LogReader, batched

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from orchestrator.api.service import LogQuery
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogEntry

FOLLOW_SECONDS = 0.1  # polling interval of a follower's files
BATCH_LINES = 1000


class LogStream:
    """Stream of a job's log. ``ended`` returns whether it has ended, and its newest attempt; ``pool`` reads files."""

    def __init__(
        self, directory: Path, query: LogQuery, ended: Callable[[], Awaitable[tuple[bool, int]]], pool: Pool
    ) -> None:
        self._directory = directory
        self._query = query
        self._ended = ended
        self._pool = pool

    async def batches(self) -> AsyncGenerator[Sequence[LogLine], None]:
        """Yield batches of lines, oldest first."""
        query = self._query
        ended, newest = await self._ended()
        reader = self._reader(newest)
        if query.tail is None:
            async for batch in self._in_pool(reader.batches(query.since)):
                yield batch
        else:
            for entries in batched(await self._pool.run(self._last, reader), BATCH_LINES):
                yield _lines(entries)
        while query.follow:
            # This order matters: the end is read first, so that all lines before it are read afterwards.
            ended, _ = await self._ended()
            async for batch in self._in_pool(reader.batches()):
                yield batch
            if ended:
                return
            await asyncio.sleep(FOLLOW_SECONDS)

    def _last(self, reader: LogReader) -> list[LogEntry]:
        query = self._query
        return [entry for entry in reader.last(query.tail or 0, query.since) if query.has(entry.text)]

    def _reader(self, newest: int) -> LogReader:
        query = self._query
        if query.attempt is not None or query.since is not None:
            return LogReader(self._directory, attempt=query.attempt, rank=query.rank)
        if query.follow:
            return LogReader(self._directory, rank=query.rank, first_attempt=newest)
        return LogReader(self._directory, attempt=newest or None, rank=query.rank)

    async def _in_pool(self, batches: Iterator[list[LogEntry]]) -> AsyncGenerator[Sequence[LogLine], None]:
        while (entries := await self._pool.run(self._next, batches)) is not None:
            if entries:
                yield _lines(entries)

    def _next(self, batches: Iterator[list[LogEntry]]) -> list[LogEntry] | None:
        entries = next(batches, None)
        return None if entries is None else [entry for entry in entries if self._query.has(entry.text)]


def _lines(entries: Sequence[LogEntry]) -> list[LogLine]:
    return [LogLine(at=e.at, attempt=e.attempt, rank=e.rank, stream=e.stream, text=e.text) for e in entries]
