"""Index of the live jobs for decisions, updated with each change of a job, so that no decision walks all jobs. Pure.

A decision examines the jobs with a record that has changed since the last decision, or with a deadline that has come;
the groups of waiting jobs (lanes.py); and the jobs that hold gangs, some of which it may stop. The index follows from
the records alone.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from orchestrator.core.facts.fact import Fact
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Job
from orchestrator.core.scheduler.conditions.held import begins_at
from orchestrator.core.scheduler.conditions.prerequisites import prerequisites
from orchestrator.core.scheduler.conditions.release import Conditions
from orchestrator.core.scheduler.lanes import Kind, Lane, Lines, kind_of, lane_of
from orchestrator.core.scheduler.occupancy import Occupancy
from orchestrator.core.scheduler.placement import could_ever_fit
from orchestrator.core.scheduler.room.holding import moves
from orchestrator.core.scheduler.room.timetable import plain
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from orchestrator.core.cluster import Node
    from orchestrator.core.scheduler.conditions.release import Release


class LiveJobs(MutableMapping[JobId, Job]):
    """Jobs by id. A record is replaced, never changed; terminal ones are kept until they are deleted, but do not wait.

    Jobs in ``active`` may hold a gang; those in ``elastic`` are active and may change their number of ranks; those in
    ``moving`` leave their nodes for others; ``conditions`` has those that wait for more than free resources.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._jobs: dict[JobId, Job] = {}
        self.active: dict[JobId, Job] = {}
        self.conditions = Conditions()
        self.elastic: dict[JobId, Job] = {}
        self.moving: dict[JobId, Job] = {}
        self.lines = Lines()
        self.occupancy = Occupancy()
        self._met: set[JobId] = set()
        self._unseen: dict[JobId, None] = {}
        self._due: list[tuple[float, JobId, int]] = []
        self._nodes: Mapping[str, Node] = {}
        self._fitting: dict[Kind, bool] = {}
        for job in jobs:
            self[job.id] = job

    def __getitem__(self, job_id: JobId) -> Job:
        return self._jobs[job_id]

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __setitem__(self, job_id: JobId, job: Job) -> None:
        self._take_out(job_id)
        self._jobs[job_id] = job
        if job.state is JobState.PENDING:
            if _is_conditional(job):
                self.conditions.add(job)
            else:
                self.lines.add(job)
        if job.state.may_hold_gang:
            self.conditions.count(job, 1)
            self.active[job_id] = job
            _keep(self.elastic, job, job.elastic is not None)
            _keep(self.moving, job, moves(job))
            self._unseen[job_id] = None
        elif job_id in self.active:
            self._let_go(job_id)
        self.conditions.changed(job_id)
        self.occupancy.put(job)

    def __delitem__(self, job_id: JobId) -> None:
        self._take_out(job_id)
        del self._jobs[job_id]
        self._let_go(job_id)
        self.conditions.changed(job_id)
        self.occupancy.drop(job_id)

    def _let_go(self, job_id: JobId) -> None:
        """Remove a job from the active ones."""
        for kept in (self.active, self.elastic, self.moving, self._unseen):
            kept.pop(job_id, None)

    def _take_out(self, job_id: JobId) -> None:
        """Remove a job's present record from the waiting jobs and the counts."""
        before = self._jobs.get(job_id)
        if before is None:
            return
        if self.in_line(before):
            self.lines.remove(before)
        self.conditions.remove(job_id)
        self._met.discard(job_id)
        if job_id in self.active:
            self.conditions.count(before, -1)

    def in_line(self, job: Job) -> bool:
        """Whether the job with this record waits for free resources alone."""
        return job.state is JobState.PENDING and (job.id in self._met or not _is_conditional(job))

    def release(self, ended: Mapping[JobId, JobState | None], now: float) -> Release:
        """Check the conditions of jobs, and move the jobs with conditions that are met for good into the lines."""
        found = self.conditions.look(self, ended, now)
        for job in found.met:
            self.conditions.remove(job.id)
            self._met.add(job.id)
            self.lines.add(job)
        return found

    def to_advance(self, now: float) -> list[Job]:
        """Return the active jobs to examine: their record is new, or the time that they waited for has come."""
        while self._due and self._due[0][0] <= now:
            _, job_id, version = heappop(self._due)
            job = self.active.get(job_id)
            if job is not None and job.version == version:
                self._unseen[job_id] = None
        return [self.active[job_id] for job_id in self._unseen]

    def seen(self, job: Job, wake_at: float | None) -> None:
        """Record that nothing follows from the job's record before ``wake_at``; None: not before it changes."""
        self._unseen.pop(job.id, None)
        if wake_at is not None:
            heappush(self._due, (wake_at, job.id, job.version))

    def next_due(self) -> float | None:
        """Return the earliest time at which something follows from an unchanged record; None without one."""
        while self._due:
            at, job_id, version = self._due[0]
            job = self.active.get(job_id)
            if job is not None and job.version == version:
                return at
            heappop(self._due)
        return None

    def fits_ever(self, job: Job, kind: Kind, nodes: Mapping[str, Node]) -> bool:
        """Return ``could_ever_fit``, computed once for all equal gangs while the nodes stay the same."""
        nodes = plain(nodes)
        if nodes is not self._nodes:
            self._nodes = nodes
            self._fitting.clear()
        if kind not in self._fitting:
            self._fitting[kind] = could_ever_fit(job, nodes)
        return self._fitting[kind]


def _keep(kept: dict[JobId, Job], job: Job, here: bool) -> None:  # noqa: FBT001 - a condition as its caller has it
    if here:
        kept[job.id] = job
    else:
        kept.pop(job.id, None)


def _is_conditional(job: Job) -> bool:
    """Whether the pending job waits for more than free resources: its matrix, its start time or other jobs."""
    cell = job.submission.matrix
    limited = cell is not None and cell.max_concurrent is not None
    return limited or begins_at(job) > 0 or bool(prerequisites(job))


class Reasons(Mapping[JobId, Fact]):
    """The reason why each job waits: its own, one shared by all skipped jobs of a lane and kind, or a condition.

    Jobs in ``placed`` wait no longer.
    """

    def __init__(self, jobs: LiveJobs | None = None) -> None:
        self.own: dict[JobId, Fact] = {}
        self.shared: dict[tuple[Lane, Kind], Fact] = {}
        self.placed: set[JobId] = set()
        self._jobs = LiveJobs() if jobs is None else jobs

    def __setitem__(self, job_id: JobId, reason: Fact) -> None:
        self.own[job_id] = reason

    def __getitem__(self, job_id: JobId) -> Fact:
        if job_id in self.own:
            return self.own[job_id]
        job = self._jobs[job_id]
        if job_id in self.placed:
            raise KeyError(job_id)
        if not self._jobs.in_line(job):
            reason = self._jobs.conditions.reason(job_id)
            if reason is None:
                raise KeyError(job_id)
            return reason
        return self.shared[lane_of(job), kind_of(job)]

    def __iter__(self) -> Iterator[JobId]:
        yield from self.own
        for job_id in self._jobs.conditions:
            if job_id not in self.own and self._jobs.conditions.reason(job_id) is not None:
                yield job_id
        for lane, kind in self.shared:
            line = self._jobs.lines.by_lane.get(lane)
            for job in () if line is None else line.of_kind(kind):
                if job.id not in self.own and job.id not in self.placed:
                    yield job.id

    def __len__(self) -> int:
        return sum(1 for _ in self)
