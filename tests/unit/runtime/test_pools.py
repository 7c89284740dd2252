"""Threads by purpose: a purpose that is stuck takes no thread of another, and is reported."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orchestrator.runtime.pools import STUCK_SECONDS, Pool, Pools, SharedPool


def test_a_purpose_that_is_stuck_is_told_and_takes_no_thread_of_another() -> None:
    now = 100.0
    released = threading.Event()

    async def run() -> None:
        nonlocal now
        pool, other = Pool("logs", 2, clock=lambda: now), Pool("checkpoints", 1)
        entered = threading.Semaphore(0)

        def stuck() -> str:
            entered.release()
            released.wait(300)
            return "done"

        calls = [asyncio.create_task(pool.run(stuck)) for _ in range(3)]
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=300)
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


def test_files_that_hang_for_one_user_hold_up_no_other() -> None:
    async def story() -> None:
        pool, stuck, begun = SharedPool("submissions", 4, each=2), threading.Event(), threading.Semaphore(0)

        def hangs() -> None:
            begun.release()
            stuck.wait()

        try:
            hostile = [asyncio.create_task(pool.of(1).run(hangs)) for _ in range(10)]
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=300)
            for request in hostile[:2]:  # a request that is given up does not give its user another thread
                request.cancel()
            await asyncio.wait(hostile[:2])
            assert await asyncio.gather(*(pool.of(2).run(abs, -n) for n in range(20))) == list(range(20))
            assert not begun.acquire(blocking=False)
            assert pool.problem() == ""
        finally:
            stuck.set()
        await asyncio.gather(*hostile[2:])
        assert await pool.of(1).run(abs, -3) == 3
        with pytest.raises(ZeroDivisionError):
            await pool.of(1).run(divmod, 1, 0)
        pool.close()

    asyncio.run(story())
