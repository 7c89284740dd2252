"""Removes parked gangs after PARKED_SECONDS, for as long as there are any."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.runtime.gangs.reuse.parked_gangs import PARKED_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Expiry:
    """Awaits ``remove_parked`` every PARKED_SECONDS: it removes expired gangs; returns whether others are parked."""

    def __init__(self, remove_parked: Callable[[], Awaitable[bool]]) -> None:
        self._remove_parked = remove_parked
        self._some_parked = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, delay: float = PARKED_SECONDS) -> None:
        """Start to remove parked gangs in ``delay`` seconds: this or an earlier daemon may have parked one."""
        self._some_parked = True
        if self._task is None:
            self._task = asyncio.create_task(self._run(delay), name="parked-gangs")

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Return the task that removes gangs; None while there is none to remove."""
        return self._task

    async def _run(self, delay: float) -> None:
        while self._some_parked:
            self._some_parked = False
            await asyncio.sleep(delay)
            delay = PARKED_SECONDS
            try:
                self._some_parked |= await self._remove_parked()
            except (
                Exception
            ):  # Ray does not answer, or its head has died, and the gangs with it: the next try shows which
                self._some_parked = True
        self._task = None
