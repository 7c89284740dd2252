"""Keeps Ray's idle workers at hand: a gang uses some up, and the next gang starts faster when there are as many again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

WARM_LATER_SECONDS: Final = 0.3
MAX_WARM_WORKERS: Final = 8


class IdleWorkers:
    """Asks for idle workers after each gang that was placed. ``warm`` asks Ray, ``spawn`` runs a background task."""

    def __init__(
        self,
        warm: Callable[[int], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        later_seconds: float = WARM_LATER_SECONDS,
    ) -> None:
        self._warm = warm
        self._spawn = spawn
        self._later_seconds = later_seconds
        self._warmed_for: dict[JobId, int] = {}

    def changed(self, job: Job) -> None:
        """Ask for workers when the job's gang was placed."""
        if job.seats and self._warmed_for.get(job.id) != job.gang:
            self._warmed_for[job.id] = job.gang
            self._spawn(self._warm_later(job.num_workers))

    def ended(self, job_id: JobId) -> None:
        """Forget the job."""
        self._warmed_for.pop(job_id, None)

    async def _warm_later(self, workers: int) -> None:
        """Wait until the start that new workers would compete with is over."""
        await asyncio.sleep(self._later_seconds)
        await self._warm(min(workers, MAX_WARM_WORKERS))
