"""Threads by purpose: one purpose that is stuck takes none of another, and is told."""

from __future__ import annotations

import asyncio
import threading

from orchestrator.runtime.pools import STUCK_SECONDS, Pool, Pools


def test_a_purpose_that_is_stuck_is_told_and_takes_no_thread_of_another() -> None:
    now = 100.0
    released = threading.Event()

    async def run() -> None:
        nonlocal now
        pool, other = Pool("logs", 2, clock=lambda: now), Pool("checkpoints", 1)
        entered = threading.Semaphore(0)

        def stuck() -> str:
            entered.release()
            released.wait(60)
            return "done"

        calls = [asyncio.create_task(pool.run(stuck)) for _ in range(3)]
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=30)
        assert pool.busy
        assert pool.problem() == "", "it is busy, and may be for good reason"
        now += STUCK_SECONDS
        assert "all 2 threads for logs have been waiting" in pool.problem()
        assert await other.run(lambda: "here") == "here"
        released.set()
        assert await asyncio.gather(*calls) == ["done"] * 3
        assert pool.problem() == ""
        assert not pool.busy
        pool.close()
        other.close()

    try:
        asyncio.run(run())
    finally:
        released.set()


def test_an_error_is_the_caller_s_and_frees_the_thread() -> None:
    def failing() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        pools = Pools()
        for _ in range(9):
            try:
                await pools.outputs.run(failing)
            except ZeroDivisionError:
                continue
        assert not pools.busy
        assert pools.problems() == []
        pools.close()

    asyncio.run(run())
