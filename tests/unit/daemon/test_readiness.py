"""Readiness names the parts that do not answer, and no part that does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from orchestrator.daemon.health import DaemonHealth, Endpoints, Readiness
from orchestrator.runtime.pools import Pools
from orchestrator.store.disk import MIN_FREE_BYTES
from orchestrator.store.errors import disk_sentence
from orchestrator.store.records import DamagedRecord, DiskStatus, DiskTrouble
from orchestrator.store.store import Store
from tests.support.stores import new_store
from tests.unit.daemon.parts import Rounds

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path
    from typing import Any


def impatient(parts: Mapping[str, Callable[[], Awaitable[Any]]], known: Callable[[], list[str]] = list) -> Readiness:
    """Return a readiness check that soon reports a stuck part."""
    return Readiness(known, parts, part_seconds=0.5)


def asked(**parts: Callable[[], Awaitable[Any]]) -> list[str]:
    async def ask() -> list[str]:
        return await impatient(parts, lambda: ["known"]).problems()

    return asyncio.run(ask())


async def works() -> None:
    pass


async def hangs() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise OSError("the disk is gone")


def test_parts_that_answer_are_not_named() -> None:
    assert asked(store=works, loop=works) == ["known"]


def test_a_part_that_hangs_and_one_that_fails_are_named() -> None:
    problems = asked(store=works, loop=hangs, pool=fails)
    assert problems == ["known", "loop gives no answer within 500ms", "pool does not work: the disk is gone"]


def test_a_pool_without_a_free_thread_is_not_ready() -> None:
    async def ask() -> list[str]:
        loop, free = asyncio.get_running_loop(), threading.Event()
        for _ in range(100):
            loop.run_in_executor(None, free.wait)
        try:
            return await impatient({"the pool": lambda: asyncio.to_thread(int)}).problems()
        finally:
            free.set()

    assert asyncio.run(ask()) == ["the pool gives no answer within 500ms"]


@pytest.mark.parametrize("pool", ["_readers", "writer"])
def test_a_store_whose_thread_is_stuck_is_not_ready(tmp_path: Path, pool: str) -> None:
    store = Store.open(tmp_path / "s", reserve=None, reserve_bytes=0, min_free_bytes=min(MIN_FREE_BYTES, 1))
    stuck = threading.Event()

    class Stuck:
        essential, shrinks = True, False

        def __call__(self, _connection: object) -> None:
            stuck.wait(300)

        committed = undone = lambda _: None

    async def ask() -> list[str]:
        assert await Readiness(list, {"the store": store.answers}, part_seconds=60.0).problems() == []
        if pool == "writer":
            held = asyncio.ensure_future(store._writer.do(Stuck()))
        else:
            held = asyncio.ensure_future(asyncio.wrap_future(store._readers.submit(stuck.wait, 60)))
        await asyncio.sleep(0)
        problems = await impatient({"the store": store.answers}).problems()
        stuck.set()
        await held
        return problems

    with contextlib.closing(store):
        assert asyncio.run(ask()) == ["the store gives no answer within 500ms"]


@pytest.mark.parametrize("trouble", DiskTrouble)
def test_a_disk_that_takes_no_job_is_named_and_does_not_keep_the_daemon_from_starting(
    tmp_path: Path, trouble: DiskTrouble
) -> None:
    async def look() -> tuple[bool, tuple[str, ...], list[str]]:
        store, ready = new_store(), asyncio.Event()
        ready.set()
        store.disk = lambda: DiskStatus(free_bytes=1, reserve_present=True, trouble=trouble)  # type: ignore[method-assign]
        async with Rounds(store) as rounds:
            health = DaemonHealth(
                rounds.loop,
                store,
                Pools(),
                known={},
                ready=ready,
                endpoints=Endpoints(home=str(tmp_path), started_at=0.0),
                ray_address=str,
                simulated_gpus=int,
                ray_problem=str,
            )
            health.damaged = [DamagedRecord("torn-aaaaaa", "the record of job torn-aaaaaa is damaged", rebuilt=False)]
            view = await health.view()
            return view.ready, view.problems, health.not_ready()

    ready, problems, not_ready = asyncio.run(look())
    (told,) = not_ready
    assert told.startswith(disk_sentence(trouble, tmp_path))
    assert (ready, problems) == (True, (told, "the record of job torn-aaaaaa is damaged"))
