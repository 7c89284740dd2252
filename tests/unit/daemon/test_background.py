"""Background tasks: failures that end the daemon, and tasks that do not end."""

from __future__ import annotations

import asyncio

from orchestrator.daemon.daemon import Background
from tests.unit.daemon.parts import LOG


async def fails() -> None:
    raise ValueError("broken")


async def sleeps() -> None:
    await asyncio.Event().wait()


def test_a_supervised_task_that_fails_ends_the_daemon() -> None:
    async def run() -> None:
        ended = asyncio.Event()
        background = Background(ended.set, LOG)
        background.supervise(sleeps(), "sleeps")
        background.supervise(fails(), "fails")
        async with asyncio.timeout(300):
            await ended.wait()
        assert str(background.failure) == "broken"
        await background.end()
        assert background.uncancelled == set()

    asyncio.run(run())


def test_another_one_does_not() -> None:
    async def run() -> None:
        told: list[str] = []
        background = Background(lambda: told.append("ended"), LOG)
        background.spawn(fails())
        returned = asyncio.Event()

        async def returns() -> None:
            returned.set()

        background.supervise(returns(), "returns")
        async with asyncio.timeout(300):
            await returned.wait()  # it was made last
        await background.end()
        assert (told, background.failure) == ([], None)

    asyncio.run(run())


def test_a_task_that_does_not_end_is_known() -> None:
    async def run() -> None:
        release = asyncio.Event()

        async def deaf() -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        background = Background(lambda: None, LOG, end_seconds=0.05)
        background.spawn(deaf())
        await asyncio.sleep(0)
        await background.end()
        assert len(background.uncancelled) == 1
        release.set()
        await asyncio.wait(background.uncancelled)

    asyncio.run(run())
