"""The nodes of a simulation, and the jobs that run on them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor
from typing import TYPE_CHECKING

from orchestrator.core.cluster import EPSILON, Free
from orchestrator.core.scheduler.placement import give_back, take
from orchestrator.core.scheduler.room.holding import Holding
from orchestrator.core.scheduler.room.vacancy import Vacancy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.simulation.trace import TraceJob


@dataclass(slots=True)
class Live:
    """A job that waits or runs, and the seconds that are ``left`` of it."""

    job: TraceJob
    record: Job
    left: float
    started_at: float | None = None
    since: float = 0.0
    shares: tuple[str | None, ...] = ()
    starts: int = 0
    preemptions: int = 0
    moves: int = 0
    lost: float = 0.0


def kept_seconds(seconds: float, every: float) -> float:
    """Return the part of an attempt that its newest checkpoint covers."""
    return floor(seconds / every + EPSILON) * every


class RunningJobs:
    """Jobs that run, ordered by their ends. As ``Saves``, each saves every ``checkpoint_seconds`` of its attempt."""

    def __init__(self, checkpoint_seconds: float) -> None:
        self.holding = Holding()
        self._live: dict[JobId, Live] = {}
        self._ends: list[tuple[float, JobId, int]] = []
        self._every = checkpoint_seconds

    @property
    def next_end(self) -> float | None:
        """Return when the next job ends, or would have, had it not been stopped."""
        return self._ends[0][0] if self._ends else None

    def start(self, live: Live, now: float) -> None:
        """Start or continue a job."""
        live.since = now
        live.started_at = now if live.started_at is None else live.started_at
        live.starts += 1
        self._live[live.record.id] = live
        self.holding.put(live.record)
        heappush(self._ends, (now + live.left, live.record.id, live.starts))

    def drop(self, live: Live) -> None:
        """Remove a job that no longer runs."""
        del self._live[live.record.id]
        self.holding.drop(live.record.id)

    def ended(self, now: float) -> Live | None:
        """Return a job that has ended by ``now``, which the caller drops; None if there is none."""
        while self._ends and self._ends[0][0] <= now:
            _, job_id, starts = heappop(self._ends)
            live = self._live.get(job_id)
            if live is not None and live.starts == starts:  # else it was preempted or moved since
                return live
        return None

    def kept(self, live: Live, now: float) -> float:
        """Return the seconds of a job's attempt that its newest checkpoint covers."""
        return kept_seconds(now - live.since, self._every)

    def saved_at(self, job: Job, now: float) -> float | None:
        """Return when the newest checkpoint was saved."""
        live = self._live[job.id]
        kept = self.kept(live, now)
        return live.since + kept if kept else None

    def next_at(self, job: Job, now: float) -> float | None:
        """Return when the next one is saved."""
        live = self._live[job.id]
        return live.since + self.kept(live, now) + self._every


class Cluster:
    """The free resources of the nodes, kept from event to event."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self.free = Vacancy({node.id: Free.of(node) for node in nodes.values() if node.schedulable})
        self.gpus = sum(free.gpus for free in self.free.values())
        self.busy = 0.0
        self.pieces = 0.0

    @property
    def full(self) -> bool:
        """Return whether no GPU is idle."""
        return self.busy >= self.gpus - EPSILON

    def take(self, job: Job, placed: Sequence[str], gpus: float) -> tuple[str | None, ...]:
        """Place a gang; a share of a GPU is taken where it leaves the least."""
        self._count(placed, -1)
        if 0 < gpus < 1:
            shares: list[str | None] = []
            for node_id in placed:
                shares += take(job, (node_id,), self.free, (self._fullest(node_id, gpus),))
            taken = tuple(shares)
        else:
            taken = take(job, placed, self.free)
        self._count(placed, 1)
        self.busy += gpus * len(placed)
        return taken

    def give_back(self, job: Job, shares: Sequence[str | None], gpus: float) -> None:
        """Release a gang."""
        self._count(job.nodes, -1)
        give_back(job, job.nodes, shares, self.free)
        self._count(job.nodes, 1)
        self.busy -= gpus * len(job.nodes)

    def _fullest(self, node_id: str, gpus: float) -> str | None:
        fitting = {name: left for name, left in self.free[node_id].shares.items() if left >= gpus - EPSILON}
        return min(fitting, key=fitting.__getitem__, default=None)

    def _count(self, placed: Sequence[str], sign: int) -> None:
        for node_id in placed if len(placed) == 1 else set(placed):
            left = self.free[node_id].gpus
            if left < self.nodes[node_id].gpus - EPSILON:
                self.pieces += sign * left
