"""Yields to the event loop between the parts of a long computation."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TURN_SECONDS: Final = 0.004

T = TypeVar("T")


async def in_turns(
    values: Iterable[T], *, seconds: float = TURN_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> list[T]:
    """Return the values as a list. Whenever computing them has taken ``seconds``, yield to the event loop."""
    made, began = [], clock()
    for value in values:
        made.append(value)
        if clock() - began >= seconds:
            await asyncio.sleep(0)
            began = clock()
    return made
