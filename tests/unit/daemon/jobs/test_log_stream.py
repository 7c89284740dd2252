"""A job's log as a stream, also with files of the wrong kind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.api.service import LogQuery
from orchestrator.daemon.requests.reader import LogStream
from orchestrator.runtime.pools import Pool
from orchestrator.runtime.ranks.logs import LogWriter, log_path


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool("logs", 2)
    yield pool
    pool.close()


def write(directory: Path, attempt: int, rank: int, *lines: str) -> None:
    writer = LogWriter(log_path(directory, attempt, rank))
    for number, line in enumerate(lines):
        writer.feed("o", line.encode() + b"\n", 100.0 * attempt + number)
    writer.close(0.0)


async def lines(directory: Path, pool: Pool, newest: int = 2, **query: object) -> list[str]:
    async def ended() -> tuple[bool, int]:
        return True, newest

    stream = LogStream(directory, LogQuery(**query), ended, pool)  # type: ignore[arg-type]
    return [line.text async for batch in stream.batches() for line in batch]


def test_which_attempts_are_shown(tmp_path: Path, pool: Pool) -> None:
    write(tmp_path, 1, 0, "a", "b")
    write(tmp_path, 2, 0, "c", "d")
    assert asyncio.run(lines(tmp_path, pool)) == ["c", "d"]
    assert asyncio.run(lines(tmp_path, pool, follow=True)) == ["c", "d"]
    assert asyncio.run(lines(tmp_path, pool, attempt=1)) == ["a", "b"]
    assert asyncio.run(lines(tmp_path, pool, since=101.0)) == ["b", "c", "d"]
    assert asyncio.run(lines(tmp_path, pool, tail=1)) == ["d"]
    assert asyncio.run(lines(tmp_path, pool, tail=0)) == []
    assert asyncio.run(lines(tmp_path, pool, since=100.0, tail=3)) == ["b", "c", "d"]
    assert asyncio.run(lines(tmp_path, pool, tail=1, follow=True)) == ["d"]


def test_readers_of_a_log_that_is_a_fifo_take_no_thread(tmp_path: Path, pool: Pool) -> None:
    """Each reader would block a thread for ever, waiting for a writer."""
    (tmp_path / "attempt-0002").mkdir()
    os.mkfifo(log_path(tmp_path, 2, 0))

    async def run() -> None:
        async with asyncio.timeout(300):
            found = await asyncio.gather(*(lines(tmp_path, pool) for _ in range(10)))
        assert found == [["[orch] rank-00000.log is left out: it is not a regular file"]] * 10

    asyncio.run(run())
    assert not pool.busy


def test_a_long_log_comes_in_batches(tmp_path: Path, pool: Pool) -> None:
    write(tmp_path, 2, 0, *map(str, range(2500)))

    async def ended() -> tuple[bool, int]:
        return True, 2

    async def sizes(query: LogQuery) -> list[int]:
        return [len(batch) async for batch in LogStream(tmp_path, query, ended, pool).batches()]

    assert asyncio.run(sizes(LogQuery())) == [1000, 1000, 500]
    assert asyncio.run(sizes(LogQuery(tail=1500))) == [1000, 500]


def test_a_search_gives_the_lines_that_contain_a_text_whatever_its_case(tmp_path: Path, pool: Pool) -> None:
    write(tmp_path, 2, 0, "Loss 1", "step 1", *map(str, range(2500)), "LOSS 2")
    assert asyncio.run(lines(tmp_path, pool, contains="loss")) == ["Loss 1", "LOSS 2"]
    assert asyncio.run(lines(tmp_path, pool, contains="loss", tail=100)) == ["LOSS 2"]
    assert asyncio.run(lines(tmp_path, pool, contains="nothing", follow=True)) == []
