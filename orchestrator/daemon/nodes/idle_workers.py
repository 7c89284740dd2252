"""Replenishes Ray's idle workers: a gang uses some, and the next gang starts faster when they are replaced.

An idle worker, like any of Ray's, wakes up a hundred times a second. So none is made while the nodes are full and no job waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.cluster import EPSILON

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Seat
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.live_jobs import LiveJobs

WARM_LATER_SECONDS: Final = 0.3
MAX_WARM_WORKERS: Final = 8
KNOWN_ACTORS: Final = 1024


class IdleWorkers:
    """Requests idle workers after each placed gang, unless its actors served a gang before, so that it used none.

    ``warm`` requests a number of them by node; ``spawn`` runs a background task. Where ``useful`` is false the request waits until it is true.
    """

    def __init__(
        self,
        warm: Callable[[Mapping[str, int]], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        useful: Callable[[], bool],
        later_seconds: float = WARM_LATER_SECONDS,
    ) -> None:
        self._warm = warm
        self._spawn = spawn
        self._useful = useful
        self._later_seconds = later_seconds
        self._warmed_for: dict[JobId, int] = {}
        self._actors: dict[tuple[str, int], None] = {}
        self._lacking: Mapping[str, int] = {}

    def changed(self, job: Job) -> None:
        """Request workers when the job's gang was placed, or those that were not useful before."""
        if job.seats and self._warmed_for.get(job.id) != job.gang:
            self._warmed_for[job.id] = job.gang
            if self._are_new(job.seats):
                self._spawn(self._warm_later(job.nodes[:MAX_WARM_WORKERS]))
        elif self._lacking:
            self._spawn(self._make_up())

    def _are_new(self, seats: Sequence[Seat]) -> bool:
        actors = dict.fromkeys((seat.node_id, seat.actor_pid) for seat in seats)
        new = not actors.keys() <= self._actors.keys()
        self._actors |= actors
        for actor in list(self._actors)[:-KNOWN_ACTORS]:
            del self._actors[actor]
        return new

    def ended(self, job_id: JobId) -> None:
        """Forget the job; on the resources that it frees, idle workers may be useful again."""
        self._warmed_for.pop(job_id, None)
        if self._lacking:
            self._spawn(self._make_up())

    async def _warm_later(self, places: Sequence[str]) -> None:
        """Wait until the gang's start, with which new workers would compete, is over."""
        await asyncio.sleep(self._later_seconds)
        self._lacking = Counter(places)
        await self._make_up()

    async def _make_up(self) -> None:
        if self._lacking and self._useful():
            lacking, self._lacking = self._lacking, {}
            await self._warm(lacking)


def can_start_more(jobs: LiveJobs, nodes: Mapping[str, Node]) -> bool:
    """Whether a job waits, or the nodes have room for one: a GPU or a part of one, on nodes without any a part of a CPU."""
    if jobs.waiting:
        return True
    free = jobs.free(nodes).sums()
    return (free.gpus if any(node.gpus for node in nodes.values()) else free.cpus) > EPSILON
