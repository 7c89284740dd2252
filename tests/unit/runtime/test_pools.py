"""Threads by purpose: a purpose that is stuck takes no thread of another, and is reported."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.runtime.pools import STUCK_SECONDS, Pool, Pools, working_for

if TYPE_CHECKING:
    from collections.abc import Callable


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


async def run_for(pool: Pool, uid: int, function: Callable[..., Any], *args: object) -> Any:
    with working_for(uid):
        return await pool.run(function, *args)


def test_files_that_hang_for_one_user_hold_up_no_other() -> None:
    async def story() -> None:
        pool, stuck, begun = Pool("submissions", 4, each=2), threading.Event(), threading.Semaphore(0)

        def hangs() -> None:
            begun.release()
            stuck.wait()

        try:
            hostile = [asyncio.create_task(run_for(pool, 1, hangs)) for _ in range(10)]
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=300)
            for request in hostile[:2]:  # a request that is given up does not give its user another thread
                request.cancel()
            await asyncio.wait(hostile[:2])
            answers = await asyncio.gather(*(run_for(pool, 2, abs, -n) for n in range(20)))
            assert answers == list(range(20))
            assert not begun.acquire(blocking=False)
            assert pool.problem() == ""
        finally:
            stuck.set()
        await asyncio.gather(*hostile[2:])
        assert await run_for(pool, 1, abs, -3) == 3
        with pytest.raises(ZeroDivisionError):
            await run_for(pool, 1, divmod, 1, 0)
        pool.close()

    asyncio.run(story())


def test_one_user_s_stuck_calls_are_told_although_other_users_have_threads() -> None:
    now, released = 100.0, threading.Event()

    async def story() -> None:
        nonlocal now
        pool, entered = Pool("logs", 4, each=2, clock=lambda: now), threading.Semaphore(0)

        def stuck() -> None:
            entered.release()
            released.wait(300)

        calls = [asyncio.create_task(run_for(pool, 1, stuck)) for _ in range(2)]
        for _ in range(2):
            assert await asyncio.to_thread(entered.acquire, timeout=300)
        now += STUCK_SECONDS
        assert "2 of 4 threads for logs have been waiting" in pool.problem()
        released.set()
        await asyncio.gather(*calls)
        pool.close()

    try:
        asyncio.run(story())
    finally:
        released.set()


def test_users_take_turns_whoever_asked_first() -> None:
    async def story() -> None:
        pool, free, order = Pool("files", 1), threading.Event(), list[int]()
        first = asyncio.create_task(run_for(pool, 0, free.wait, 300))
        await asyncio.sleep(0)
        many = [asyncio.create_task(run_for(pool, 1, order.append, 1)) for _ in range(5)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(run_for(pool, uid, order.append, uid)) for uid in (2, 3)]
        await asyncio.sleep(0)
        many[0].cancel()  # one that waits leaves the queue
        free.set()
        await asyncio.gather(first, *many[1:], *few)
        assert order == [1, 2, 3, 1, 1, 1]
        pool.close()

    asyncio.run(story())


def test_work_for_a_request_ends_soon_after_it_is_cancelled() -> None:
    async def story() -> None:
        pool, begun, ended = Pool("files", 1), threading.Event(), threading.Event()

        def long_read() -> None:
            begun.set()
            try:
                while True:
                    stop_if_abandoned()
            finally:
                ended.set()

        request = asyncio.create_task(pool.run(long_read))
        assert await asyncio.to_thread(begun.wait, 300)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await asyncio.to_thread(ended.wait, 300)
        assert await pool.run(abs, -1) == 1, "the next call of the thread is not given up with it"
        pool.close()

    asyncio.run(story())


def test_what_ends_jobs_shares_no_thread_with_what_answers_requests() -> None:
    released = threading.Event()

    async def story() -> None:
        pools = Pools()
        requests = (pools.logs, pools.checkpoints, pools.records, pools.files, pools.outlook, pools.submissions)
        calls = [asyncio.create_task(run_for(pool, n, released.wait, 300)) for pool in requests for n in range(20)]
        await asyncio.sleep(0)
        assert await pools.outputs.run(abs, -1) == await pools.starts.run(abs, -1) == 1
        released.set()
        await asyncio.gather(*calls)
        pools.close()

    try:
        asyncio.run(story())
    finally:
        released.set()
