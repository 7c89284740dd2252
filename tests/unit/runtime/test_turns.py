"""A long computation lets other work have its turn."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from orchestrator.runtime.turns import in_turns

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_other_work_has_a_turn_whenever_the_time_is_up() -> None:
    async def run() -> list[int]:
        order: list[int] = []

        async def other() -> None:
            for _ in range(3):
                order.append(-1)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        ticks = itertools.count()

        def made() -> Iterator[int]:
            for value in range(4):
                order.append(value)
                yield value

        assert await in_turns(made(), seconds=2.0, clock=lambda: float(next(ticks))) == [0, 1, 2, 3]
        await task
        return order

    assert asyncio.run(run()) == [0, 1, -1, 2, 3, -1, -1]


def test_a_quick_one_is_not_interrupted() -> None:
    async def run() -> list[int]:
        return await in_turns(range(5), seconds=1.0, clock=lambda: 0.0)

    assert asyncio.run(run()) == list(range(5))
