"""A session's descriptors: bounded on both sides, and never blocking."""

from __future__ import annotations

import asyncio
import os

from orchestrator.runtime.ranks.session_messages import READ_BYTES
from orchestrator.runtime.ranks.terminal import InputEnd, OutputEnd
from tests.support.stack import PATIENCE_SECONDS


async def until(news: asyncio.Event, output: OutputEnd, size: int) -> bytes:
    data = b""
    while len(data) < size and not (output.over and not output):
        if not output:
            news.clear()
            await news.wait()
        data += output.take()
    return data


def test_a_writer_waits_for_a_slow_reader_and_nothing_is_lost() -> None:
    async def run() -> None:
        reader, writer = os.pipe()
        news = asyncio.Event()
        output, source = OutputEnd(reader, news.set), InputEnd(writer)
        sent = os.urandom(READ_BYTES * 4)
        writing = asyncio.create_task(source.write(sent))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(output._data) < READ_BYTES:  # noqa: ASYNC110 - it has no event for a test
                await asyncio.sleep(0)
            assert not output._reading, "it takes no more than it may keep"
            assert not writing.done()
            assert await until(news, output, len(sent)) == sent
            await writing
            source.close()
            assert await until(news, output, 1) == b""
            assert output.over

    asyncio.run(run())


def test_closing_wakes_a_writer_that_waits() -> None:
    async def run() -> None:
        reader, writer = os.pipe()
        source = InputEnd(writer)
        writing = asyncio.create_task(source.write(b"x" * 10_000_000))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while source._waiting is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            source.close()
            await writing
        assert source.descriptor is None
        await source.write(b"nothing happens")
        os.close(reader)

    asyncio.run(run())


def test_a_reader_that_is_gone_takes_nothing() -> None:
    async def run() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        source = InputEnd(writer)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await source.write(b"x")
        assert source.descriptor is None

    asyncio.run(run())
