"""A head that died is restarted until it comes up, and everything that died with it is forgotten."""

from __future__ import annotations

import asyncio

from orchestrator.daemon.nodes.head_care import HeadCare
from tests.unit.daemon.parts import LOG, FakeCluster


def test_it_is_started_again_until_it_comes_up() -> None:
    async def run() -> None:
        cluster, woken, problems, done = FakeCluster(), asyncio.Event(), dict[str, str](), list[str]()
        cluster.restarts = [RuntimeError("no port"), None]
        seen: list[str] = []

        async def prepare() -> None:
            seen.append(problems["ray"])

        care = HeadCare(
            cluster,
            forget=(lambda: done.append("gangs"), lambda: done.append("exporters")),
            prepare=(prepare,),
            wake=woken.set,
            problems=problems,
            log=LOG,
            retry_seconds=0.0,
        )
        task = asyncio.create_task(care.run())
        care.lost()
        assert done == ["gangs", "exporters"]
        assert problems == {"ray": "Ray's head died and is being started again"}
        async with asyncio.timeout(300):
            await woken.wait()
        assert seen == ["no port"]  # the failure was reported until the next try succeeded
        assert problems == {}
        assert cluster.restarts == []
        task.cancel()

    asyncio.run(run())


def test_one_that_dies_while_jobs_are_prepared_is_started_again_at_once() -> None:
    """Requests to its agents may never be answered: Ray waits for a minute for those that end with a raylet."""

    async def run() -> None:
        cluster, woken = FakeCluster(), asyncio.Event()
        cluster.restarts = [None, None]
        asked: list[str] = []

        async def prepare() -> None:
            asked.append("of a head")
            if len(asked) == 1:
                care.lost()
                await asyncio.Event().wait()

        care = HeadCare(
            cluster,  # type: ignore[arg-type]
            forget=(),
            prepare=(prepare,),
            wake=woken.set,
            problems={},
            log=LOG,
            retry_seconds=1e9,
        )
        task = asyncio.create_task(care.run())
        care.lost()
        async with asyncio.timeout(300):
            await woken.wait()
        assert asked == ["of a head"] * 2
        assert cluster.restarts == []
        task.cancel()

    asyncio.run(run())
