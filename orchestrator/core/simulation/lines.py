"""The waiting jobs of a simulation, kept in order: in lanes for the daemon's order, else in a policy's own."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from orchestrator.core.scheduler.lanes import Lines, arrival, lane_of
from orchestrator.core.scheduler.order import WaitingOrder
from orchestrator.core.scheduler.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.core.simulation.policies import Order, Policy


class Waiting:
    """The waiting jobs under ``policy``, and the shares of running ones."""

    def __init__(self, policy: Policy, sharing: Sharing, nodes: Mapping[str, Node], now: float) -> None:
        self._policy = policy
        self._shares = Shares(sharing, nodes, now)
        self._started: dict[tuple[str, str, int], float] = {}
        self._lines = Lines()
        self._queue: list[tuple[Order, int, Job]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, job: Job, left: float) -> None:
        """Add a waiting job, with ``left`` seconds of work."""
        self._count += 1
        if self._policy.order is None:
            self._lines.add(job)
        else:
            insort(self._queue, (self._policy.order(job, left), arrival(job), job))

    def remove(self, job: Job, left: float) -> None:
        """Remove a job."""
        self._count -= 1
        if self._policy.order is not None:
            del self._queue[bisect_left(self._queue, (self._policy.order(job, left), arrival(job)))]
            return
        self._lines.remove(job)

    def started(self, job: Job, now: float) -> None:
        """Record a job's start; the round that placed it has already counted it."""
        self._started[lane_of(job)] = now

    def ended(self, job: Job, now: float) -> None:
        """Record that a job released its gang."""
        self._shares.advance(now)
        self._shares.ended(job, len(job.nodes))

    def queues(self) -> set[str]:
        """Return the queues in which jobs wait."""
        return {lane.queue for lane in self._lines.by_lane}

    def offered(self, now: float) -> tuple[Iterable[Job], Shares]:
        """Return the jobs in the order in which they are offered, and the shares for the round."""
        self._shares.advance(now)
        if self._policy.order is None:
            return WaitingOrder(self._lines.by_lane, self._started, self._shares, now), self._shares
        first = self._queue[:1] if self._policy.first_only else self._queue
        return (job for _, _, job in first), self._shares
