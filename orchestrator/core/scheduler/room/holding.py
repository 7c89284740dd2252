"""The jobs that hold gangs, indexed by what decides whether any of them may be stopped for another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from orchestrator.core.facts.moves import ByConsolidation
from orchestrator.core.scheduler.durations import clock_of
from orchestrator.core.states import StopPurpose

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import Clock


def stops_for_another(job: Job) -> bool:
    """Whether the job stops because it was preempted."""
    return job.stop is not None and job.stop.purpose is StopPurpose.PREEMPT


def moves(job: Job) -> bool:
    """Whether the job leaves its nodes for others."""
    return job.stop is not None and job.stop.purpose is StopPurpose.MOVE


def places_of(job: Job) -> tuple[str, ...]:
    """Return the nodes that a job moves to, one for each rank; nothing for one that does not move."""
    by = job.stop.by if job.stop is not None and moves(job) else None
    return by.nodes if isinstance(by, ByConsolidation) else ()


class Holding(Collection["Job"]):
    """Jobs by id, and those of them that stop for others, that move, that are elastic or that have a ``max_duration``.

    ``ranks`` counts the jobs of each queue and priority.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.by_id: dict[JobId, Job] = {}
        self.stopping: dict[JobId, Job] = {}
        self.moving: dict[JobId, Job] = {}
        self.elastic: dict[JobId, Job] = {}
        self.limited: dict[JobId, Job] = {}
        self.ranks: Counter[tuple[str, int]] = Counter()
        self._clocks: dict[JobId, Clock] = {}
        for job in jobs:
            self.put(job)

    def __contains__(self, job: object) -> bool:
        return job in self.by_id.values()

    def __iter__(self) -> Iterator[Job]:
        return iter(self.by_id.values())

    def __len__(self) -> int:
        return len(self.by_id)

    def clocks(self) -> Iterator[tuple[Job, Clock]]:
        """Yield each job with its clock, which is computed once for a record."""
        known = self._clocks
        for job_id, job in self.by_id.items():
            clock = known.get(job_id)
            if clock is None:
                clock = known[job_id] = clock_of(job)
            yield job, clock

    def put(self, job: Job) -> None:
        """Set a job's record."""
        before = self.by_id.get(job.id)
        if before is None or before.priority != job.priority:
            if before is not None:
                self._count(before, -1)
            self._count(job, 1)
        self.by_id[job.id] = job
        self._clocks.pop(job.id, None)
        if job.elastic is not None:
            self.elastic[job.id] = job
        if job.spec.max_duration is not None:
            self.limited[job.id] = job
        self.stopping.pop(job.id, None)
        self.moving.pop(job.id, None)
        if stops_for_another(job):
            self.stopping[job.id] = job
        elif moves(job):
            self.moving[job.id] = job

    def drop(self, job_id: JobId) -> Job | None:
        """Remove a job; return its record."""
        job = self.by_id.pop(job_id, None)
        if job is not None:
            self._count(job, -1)
            self._clocks.pop(job_id, None)
            self.stopping.pop(job_id, None)
            self.moving.pop(job_id, None)
            self.elastic.pop(job_id, None)
            self.limited.pop(job_id, None)
        return job

    def _count(self, job: Job, sign: int) -> None:
        key = (job.spec.queue, job.priority)
        self.ranks[key] += sign
        if not self.ranks[key]:
            del self.ranks[key]
