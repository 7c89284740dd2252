"""Checks whether the daemon can work now: each part must respond in time, and one that does not is named."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.deadline import within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

PART_SECONDS: Final = 2.0
FRESH_SECONDS: Final = 1.0
"""Time for which an answer is cached: any process of the machine may request it, at any rate."""


class Readiness:
    """Readiness. ``known`` returns recorded problems; ``parts`` are named calls that return if the part works."""

    def __init__(
        self,
        known: Callable[[], Sequence[str]],
        parts: Mapping[str, Callable[[], Awaitable[Any]]],
        *,
        part_seconds: float = PART_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
    ) -> None:
        self._part_seconds = part_seconds
        self._fresh_seconds = fresh_seconds
        self._known = known
        self._parts = parts
        self._asking: asyncio.Task[list[str]] | None = None
        self._asked_at = float("-inf")

    async def problems(self) -> list[str]:
        """Return why no job can be accepted and placed now; nothing where one can."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked_at > self._fresh_seconds):
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._probe(), name="readiness")
        return [*self._known(), *await asyncio.shield(self._asking)]

    async def _probe(self) -> list[str]:
        found = await asyncio.gather(*(self._one(name, part) for name, part in self._parts.items()))
        return [problem for problem in found if problem]

    async def _one(self, name: str, part: Callable[[], Awaitable[Any]]) -> str:
        try:
            await within(self._part_seconds, part())
        except TimeoutError:
            return f"{name} gives no answer within {self._part_seconds:g} s"
        except Exception as error:
            return f"{name} does not work: {error}"
        return ""


def readiness_of(
    known: Callable[[], Sequence[str]], store: Callable[[], Awaitable[Any]], loop: Callable[[], Awaitable[Any]]
) -> Readiness:
    """Return the daemon's readiness: its store, its loop, and the general thread pool."""
    parts: dict[str, Callable[[], Awaitable[Any]]] = {
        "the store": store,
        "the loop that decides": loop,
        "the pool of threads": lambda: asyncio.to_thread(time.monotonic),
    }
    return Readiness(known, parts)
