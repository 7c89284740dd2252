"""The jobs that wait for more than free resources, kept from decision to decision. Pure.

A job's prerequisites are checked again when one of them changes, and its start time when it comes. Of a matrix with
``max_concurrent``, only the jobs that have a place are offered. ``held_back`` (held.py) and ``hindrance``
(prerequisites.py) compute the same for all jobs from scratch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import AwaitsJob, AwaitsTime, MatrixAtLimit
from orchestrator.core.scheduler.conditions.held import begins_at, place_in_matrix
from orchestrator.core.scheduler.conditions.prerequisites import hindrance, prerequisites

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.reasons import PrerequisiteGone, PrerequisiteUnmet
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.states import JobState

_Place = tuple[bool, int, int]


@dataclass(slots=True)
class _Limit:
    """A matrix with ``max_concurrent``, which is ``most``.

    ``used`` counts its jobs that run; ``ready`` has those that wait for a place alone, in order, of which ``open`` may
    start.
    """

    most: int
    used: int = 0
    ready: list[tuple[_Place, Job]] = field(default_factory=list)
    open: frozenset[JobId] = frozenset()


@dataclass(slots=True)
class Release:
    """Result of a look at the conditions: jobs that must end, jobs that may be considered, and when to look again.

    Jobs in ``met`` wait for free resources alone from now on; those in ``released`` do as long as their matrix has a
    place for them.
    """

    failing: list[tuple[Job, PrerequisiteUnmet | PrerequisiteGone]] = field(default_factory=list)
    met: list[Job] = field(default_factory=list)
    released: list[Job] = field(default_factory=list)
    wake_at: float | None = None


class Conditions:
    """Jobs that wait for more than free resources, by what they wait for. A look examines changes and free places only.

    ``held_back`` and ``hindrance`` compute the same for all jobs at once.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobId, Job] = {}
        self._new: dict[JobId, None] = {}
        self._blocked: dict[JobId, AwaitsJob] = {}
        self._dependents: dict[JobId, dict[JobId, None]] = {}
        self._timed: dict[JobId, float] = {}
        self._times: list[tuple[float, JobId]] = []
        self._limits: dict[str, _Limit] = {}

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        """Add a job that waits for more than free resources."""
        self._jobs[job.id] = job
        self._new[job.id] = None
        for needed in prerequisites(job):
            self._dependents.setdefault(needed.job_id, {})[job.id] = None

    def remove(self, job_id: JobId) -> None:
        """Remove a job, by the record with which it was added; do nothing if it was not."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._new.pop(job_id, None)
        self._blocked.pop(job_id, None)
        self._timed.pop(job_id, None)
        for needed in prerequisites(job):
            others = self._dependents[needed.job_id]
            del others[job_id]
            if not others:
                del self._dependents[needed.job_id]
        if (limit := self._limit(job)) is not None:
            at = bisect_left(limit.ready, (place_in_matrix(job),))
            if at < len(limit.ready) and limit.ready[at][1].id == job_id:
                del limit.ready[at]
            self._forget(job)

    def changed(self, job_id: JobId) -> None:
        """Mark the jobs that depend on a changed job, so that they are checked again."""
        for dependent in self._dependents.get(job_id, ()):
            self._new[dependent] = None

    def count(self, job: Job, sign: int) -> None:
        """Count a job towards its matrix's limit (1), or no longer (-1)."""
        if (limit := self._limit(job)) is not None:
            limit.used += sign
            self._forget(job)

    def look(self, live: Mapping[JobId, Job], ended: Mapping[JobId, JobState | None], now: float) -> Release:
        """Return the jobs that may be considered now. Those that fail are returned again until their records say so."""
        found = Release()
        while self._times and (self._times[0][0] <= now or self._times[0][1] not in self._timed):
            job_id = heappop(self._times)[1]
            if self._timed.pop(job_id, None) is not None:
                self._new[job_id] = None
        for job in [self._jobs[i] for i in self._new if i in self._jobs]:
            self._check(job, hindrance(job, live, ended), now, found)
        self._new = {job.id: None for job, _ in found.failing}
        found.wake_at = self._times[0][0] if self._times else None
        for limit in self._limits.values():
            first = [job for _, job in limit.ready[: max(0, limit.most - limit.used)]]
            limit.open = frozenset(job.id for job in first)
            found.released += first
        return found

    def reason(self, job_id: JobId) -> Fact | None:
        """Return why a job may not start, as of the last ``look``; None if it may."""
        job = self._jobs.get(job_id)
        if job is None or job_id in self._new:
            return None
        if job_id in self._timed:
            return AwaitsTime(start_at=self._timed[job_id])
        limit = self._limit(job)
        if job_id in self._blocked or limit is None or job_id in limit.open:
            return self._blocked.get(job_id)
        assert job.submission.matrix is not None
        return MatrixAtLimit(matrix=job.submission.matrix.matrix_id, limit=limit.most)

    def _check(
        self, job: Job, found: AwaitsJob | PrerequisiteUnmet | PrerequisiteGone | None, now: float, release: Release
    ) -> None:
        self._blocked.pop(job.id, None)
        if isinstance(found, AwaitsJob):
            self._blocked[job.id] = found
        elif found is not None:
            release.failing.append((job, found))
        if (start_at := begins_at(job)) > now:
            if job.id not in self._timed:
                self._timed[job.id] = start_at
                heappush(self._times, (start_at, job.id))
        elif found is None and (limit := self._limit(job)) is None:
            release.met.append(job)
        elif found is None and limit is not None:
            entry = (place_in_matrix(job), job)
            at = bisect_left(limit.ready, entry[:1])
            if at == len(limit.ready) or limit.ready[at][1].id != job.id:
                limit.ready.insert(at, entry)

    def _limit(self, job: Job) -> _Limit | None:
        cell = job.submission.matrix
        if cell is None or cell.max_concurrent is None:
            return None
        return self._limits.setdefault(cell.matrix_id, _Limit(cell.max_concurrent))

    def _forget(self, job: Job) -> None:
        cell = job.submission.matrix
        limit = self._limits.get(cell.matrix_id) if cell is not None else None
        if cell is not None and limit is not None and not limit.used and not limit.ready:
            del self._limits[cell.matrix_id]
