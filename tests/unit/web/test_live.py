"""Streams: one rendering for all viewers, none while no browser is connected, whole parts, an end with the daemon."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import NoSuchJobError
from orchestrator.api.server.testing import FakeService
from orchestrator.core.ids import JobId
from orchestrator.web.job_page import LogQuestion, follow_log
from orchestrator.web.live import HEARTBEAT, Channel, follow, stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Source:
    """A part that changes when a test says so, and the number of its renderings."""

    def __init__(self) -> None:
        self.value = "a"
        self.renderings = 0
        self.fails: Exception | None = None
        self._changed = asyncio.Event()
        self._version = 1

    def change(self, value: str) -> None:
        self.value = value
        self._version += 1
        self._changed.set()

    async def render(self) -> dict[str, str]:
        self.renderings += 1
        if self.fails is not None:
            raise self.fails
        return {"part": self.value, "same": "x"}

    def version(self) -> int:
        return self._version

    async def wait(self, version: int, seconds: float) -> None:
        while self._version == version:
            self._changed.clear()
            await self._changed.wait()

    def channel(self) -> Channel:
        return Channel(self.render, self.version, self.wait, pace_seconds=0.0, idle_seconds=0.0)


async def parts(events: AsyncGenerator[bytes, None]) -> Any:
    while True:
        text = (await anext(events)).decode()
        if text.startswith("event: parts"):
            return json.loads(text.partition("data: ")[2])


def test_all_viewers_share_one_rendering_and_get_what_changed() -> None:
    async def work() -> None:
        source = Source()
        channel, closing = source.channel(), asyncio.Event()
        async with aclosing(stream(channel, closing)) as one, aclosing(stream(channel, closing)) as other:
            assert await parts(one) == {"part": "a", "same": "x"}
            assert await parts(other) == {"part": "a", "same": "x"}
            assert source.renderings == 1
            source.change("b")
            assert await parts(one) == {"part": "b"}
            assert await parts(other) == {"part": "b"}
            assert source.renderings == 2
        assert not channel.is_watched
        source.change("c")
        await asyncio.sleep(0)
        assert source.renderings == 2

    asyncio.run(work())


def test_a_slow_viewer_gets_the_newest_and_no_backlog() -> None:
    async def work() -> None:
        source = Source()
        channel = source.channel()
        viewer, other = channel.join(), channel.join()
        for value in ("b", "c", "d"):
            while not other.pending:
                await other.woken.wait()
                other.woken.clear()
            other.pending = {}
            source.change(value)
        while other.pending.get("part") != "d":
            other.woken.clear()
            await other.woken.wait()
        assert viewer.pending == {"part": "d", "same": "x"}
        channel.leave(viewer)
        channel.leave(other)

    asyncio.run(work())


def test_a_stream_ends_with_the_daemon_and_with_the_job() -> None:
    async def work() -> None:
        source, closing = Source(), asyncio.Event()
        events = stream(source.channel(), closing)
        await parts(events)
        closing.set()
        assert [event async for event in events if event != HEARTBEAT] == []
        source.fails = NoSuchJobError("it was removed")
        assert [event async for event in stream(source.channel(), asyncio.Event(), 60.0) if b"parts" in event] == []

    asyncio.run(work())


def test_a_silent_stream_has_heartbeats() -> None:
    async def work() -> None:
        events = stream(Source().channel(), asyncio.Event(), 0.0)
        while await anext(events) != b": \n\n":
            pass
        await events.aclose()

    asyncio.run(work())


def test_a_log_is_followed_to_its_end_with_what_it_was_asked_for() -> None:
    async def work() -> None:
        service = FakeService()
        job = service.add(state="RUNNING", num_workers=2)
        service.write(job.id, "one", "other \x1b[0m")
        events = follow(follow_log(service, JobId(job.id), LogQuestion(text="ONE")), asyncio.Event())
        assert (await anext(events)).startswith(b"event: begin")
        (line,) = json.loads((await anext(events)).partition(b"data: ")[2])
        assert (line["text"], line["rank"]) == ("one", 0)
        service.write(job.id, "one more")
        assert b"one more" in await anext(events)
        service.set(job.id, state="SUCCEEDED")
        assert (await anext(events)).startswith(b"event: end")

    asyncio.run(work())


def test_a_followed_log_ends_with_the_daemon() -> None:
    async def work() -> None:
        service, closing = FakeService(), asyncio.Event()
        job = service.add(state="RUNNING")
        events = follow(follow_log(service, JobId(job.id), LogQuestion()), closing)
        await anext(events)
        closing.set()
        rest = [event async for event in events]
        assert not [event for event in rest if b"end" in event]

    asyncio.run(work())


def test_a_browser_that_leaves_leaves_no_task_behind() -> None:
    async def work() -> None:
        events = stream(Source().channel(), asyncio.Event(), 60.0)
        await parts(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await events.aclose()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            assert all(task.cancelling() for task in others)
            await asyncio.sleep(0)

    asyncio.run(work())
