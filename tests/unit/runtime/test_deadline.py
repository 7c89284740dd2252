"""Deadlines on awaited calls: they end a call that takes too long, and never lose a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.runtime.deadline import within


async def answer_at_once() -> int:
    return 7


def test_what_comes_in_time_is_given_back() -> None:
    assert asyncio.run(within(60.0, answer_at_once())) == 7


def test_what_takes_too_long_is_cancelled() -> None:
    async def scene() -> bool:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await within(0.01, never)
        return never.cancelled()

    assert asyncio.run(scene())


def test_a_cancellation_in_the_turn_of_the_answer_is_not_lost() -> None:
    async def scene() -> bool:
        woken = asyncio.Event()
        task = asyncio.create_task(within(60.0, woken.wait()))
        await asyncio.sleep(0)
        woken.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert asyncio.run(scene())
