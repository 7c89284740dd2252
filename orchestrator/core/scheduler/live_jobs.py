"""The live jobs with what decisions derive from their records, brought up to date with each change of a job. Pure.

A decision looks at the groups of waiting jobs, the jobs that hold gangs, and the active jobs with a new record or a
deadline that has come. All of it follows from the records alone, so an index made anew gives the same decisions.

A waiting job may wait for more than free resources: other jobs, its start time, a place in its matrix. Dependencies are resolved to ids
when a job is accepted, so they form no cycle: each is older than the job. They count until its first attempt; the end of a
prerequisite never changes. A job that is held back claims nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.reasons import (
    AwaitsJob,
    AwaitsTime,
    ByMatrix,
    MatrixAtLimit,
    PrerequisiteGone,
    PrerequisiteUnmet,
)
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Job
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.scheduler.durations import clock_of
from orchestrator.core.scheduler.order import WaitingJobs
from orchestrator.core.scheduler.placement import FreeNodes, could_ever_fit, free_on, plain, share_unknown, topology_of
from orchestrator.core.scheduler.shares import Accounts, Amounts, capacity_of
from orchestrator.core.states import AttemptState, JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from orchestrator.core import events as ev
    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Prerequisite
    from orchestrator.core.scheduler.durations import Clock
    from orchestrator.core.scheduler.order import Group


@dataclass(slots=True)
class Release:
    """Result of a check: jobs that must end, jobs that may be considered, why the others may not, when to check again."""

    failing: list[tuple[Job, PrerequisiteUnmet | PrerequisiteGone]] = field(default_factory=list)
    released: list[Job] = field(default_factory=list)
    waiting: dict[JobId, Fact] = field(default_factory=dict)
    wake_at: float | None = None


def is_conditional(job: Job) -> bool:
    """Whether a pending job waits for more than free resources."""
    cell = job.submission.matrix
    limited = cell is not None and cell.max_concurrent is not None
    return job.state is JobState.PENDING and (limited or begins_at(job) > 0 or bool(prerequisites(job)))


def check(
    jobs: Iterable[Job],
    active: Iterable[Job],
    live: Mapping[JobId, Job],
    ended: Mapping[JobId, JobState | None],
    now: float,
) -> Release:
    """Check the conditions of ``jobs``; ``active`` are those that may hold a gang and so count for their matrix."""
    found = Release()
    limited: list[Job] = []
    for job in jobs:
        hindered = hindrance(job, live, ended)
        if isinstance(hindered, PrerequisiteUnmet | PrerequisiteGone):
            found.failing.append((job, hindered))
            continue
        start_at = begins_at(job)
        if start_at > now:
            found.waiting[job.id] = AwaitsTime(start_at=start_at)
            found.wake_at = start_at if found.wake_at is None else min(found.wake_at, start_at)
        elif hindered is not None:
            found.waiting[job.id] = hindered
        elif job.submission.matrix is not None and job.submission.matrix.max_concurrent is not None:
            limited.append(job)
        else:
            found.released.append(job)
    used = Counter(job.submission.matrix.matrix_id for job in active if job.submission.matrix) if limited else Counter()
    # Those that have run come first, then priority and arrival.
    for job in sorted(limited, key=lambda job: (not job.attempts, -job.priority, job.submission.sequence)):
        cell = job.submission.matrix
        assert cell is not None
        assert cell.max_concurrent is not None
        if used[cell.matrix_id] < cell.max_concurrent:
            used[cell.matrix_id] += 1
            found.released.append(job)
        else:
            found.waiting[job.id] = MatrixAtLimit(matrix=cell.matrix_id, limit=cell.max_concurrent)
    return found


def begins_at(job: Job) -> float:
    """Return the earliest start of the job's first attempt by its job.yaml; 0 for at once, and once it has started."""
    start_at = job.spec.start_at
    waits = start_at is not None and job.state is JobState.PENDING and not job.attempts
    return start_at.timestamp() if waits and start_at is not None else 0.0


def prerequisites(job: Job) -> tuple[Prerequisite, ...]:
    """Return what must have ended before the job starts; nothing once it has started, or ended itself."""
    return job.submission.prerequisites if job.state is JobState.PENDING and not job.attempts else ()


def hindrance(
    job: Job, live: Mapping[JobId, Job], ended: Mapping[JobId, JobState | None]
) -> AwaitsJob | PrerequisiteUnmet | PrerequisiteGone | None:
    """Return what keeps the job from starting: the first job that it waits for, or one that ended in the wrong way.

    ``ended`` has the states of jobs that are not in ``live``; None, or no entry, for one without a record.
    """
    open_: list[AwaitsJob] = []
    for needed in prerequisites(job):
        other = live.get(needed.job_id)
        state = ended.get(needed.job_id) if other is None else other.state
        if state is None:
            return PrerequisiteGone(job=needed.job_id, on=needed.on)
        if state.is_terminal and not needed.on.met_by(state):
            return PrerequisiteUnmet(job=needed.job_id, on=needed.on, state=state)
        if not state.is_terminal:
            open_.append(AwaitsJob(job=needed.job_id, on=needed.on, state=state))
    if not open_:
        return None
    first = open_[0]
    return AwaitsJob(job=first.job, on=first.on, state=first.state, more=len(open_) - 1)


def fail_fast(jobs: Iterable[Job], failed: Mapping[str, JobId], now: float) -> list[ev.Event]:
    """Return the events that end the other jobs of the matrices in ``failed``, which has each one's failed job."""
    found: list[ev.Event] = []
    for job in jobs:
        cell = job.submission.matrix
        if cell is not None and cell.fail_fast and cell.matrix_id in failed:
            by = ByMatrix(matrix=cell.matrix_id, job=failed[cell.matrix_id])
            found += request_stop(job, StopPurpose.CANCEL, by, now)
    return found


WINDOW_SECONDS: Final = 3600.0
MAX_IN_A_WINDOW: Final = 4
"""A job that was preempted this often in the last hour is not preempted until the first of these was an hour ago."""


class Occupant(NamedTuple):
    """A job that holds a gang, with what decisions derive from its record.

    It may stop for another from ``stops_at`` on, None: not before its record changes. ``began`` is when its ranks were
    up. ``ends``: its resources become free without a further stop. ``unknown``: less is free beside it than it seems.
    """

    job: Job
    clock: Clock
    stops_at: float | None
    began: float
    ends: bool
    unknown: bool


def preemptible_at(job: Job) -> float:
    """Return from when on a running job may be preempted: after its ``min_runtime``, and not too often in an hour."""
    attempt, at = job.attempt, 0.0
    if attempt is not None and attempt.running_at is not None and job.spec.min_runtime is not None:
        at = attempt.running_at + job.spec.min_runtime.total_seconds()
    stopped = [a.ended_at for a in job.attempts if a.state is AttemptState.PREEMPTED and a.ended_at is not None]
    return max(at, stopped[-MAX_IN_A_WINDOW] + WINDOW_SECONDS) if len(stopped) >= MAX_IN_A_WINDOW else at


def occupant_of(job: Job) -> Occupant:
    """Return what decisions derive from the record of a job that holds a gang."""
    began, ends = job.attempts[-1].running_at, ends_anyway(job)
    able = job.state is JobState.RUNNING and job.spec.preemptible and not (job.degraded or job.succeeded)
    at = preemptible_at(job) if able and began is not None else None
    return Occupant(job, clock_of(job), at, began or 0.0, ends, share_unknown(job) and not ends)


def ends_anyway(job: Job) -> bool:
    """Whether the gang's resources become free without a further stop; a resized job takes as much again."""
    if job.stop is not None:
        return not job.stop.purpose.returns
    return job.succeeded or job.state.is_terminal


class LiveJobs(MutableMapping[JobId, Job]):
    """Jobs by id. A record is replaced, never changed; terminal ones are kept until they are deleted, but do not wait.

    Jobs in ``active`` may hold a gang, those in ``holding`` do; those in ``elastic`` are active and may change their
    number of ranks. ``waiting`` has those that wait for free resources alone.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._jobs: dict[JobId, Job] = {}
        self.active: dict[JobId, Job] = {}
        self.holding: dict[JobId, Job] = {}
        self.elastic: dict[JobId, Job] = {}
        self.waiting = WaitingJobs()
        self._due: dict[JobId, float] = {}
        self._conditional: dict[JobId, Job] = {}
        self._release: Release | None = None
        self._occupants: dict[JobId, Occupant] = {}
        self._stale: dict[JobId, None] = {}
        self._on: dict[str, dict[JobId, None]] = {}
        self._nodes: Mapping[str, Node] = {}
        self._changed: set[str] = set()
        self._free = FreeNodes()
        self._accounts: Accounts | None = None
        self._plain: Mapping[str, Node] = {}
        self._capacity = Amounts()
        self._fitting: dict[tuple[object, ...], bool] = {}
        for job in jobs:
            self[job.id] = job

    def __getitem__(self, job_id: JobId) -> Job:
        return self._jobs[job_id]

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)

    def __setitem__(self, job_id: JobId, job: Job) -> None:
        before = self._jobs.get(job_id)
        if before is None or before.state is not job.state:
            self._release = None
        if before is not None and before.state is JobState.PENDING:
            self._wait_no_longer(before)
        self._jobs[job_id] = job
        if job.state is JobState.PENDING:
            if is_conditional(job):
                self._conditional[job_id] = job
                self._release = None
            else:
                self.waiting.add(job)
        if job.state.may_hold_gang:
            self.active[job_id] = job
            self._due[job_id] = -inf
            if job.elastic is not None:
                self.elastic[job_id] = job
        elif job_id in self.active:
            self._forget(job_id)
        held = self.holding.get(job_id)
        if held is None or held.held is not job.held or held.attempts is not job.attempts:
            self._let_go(job_id)
            if job.gang_open:
                self._hold(job)
        else:
            self.holding[job_id] = job
            self._stale[job_id] = None

    def __delitem__(self, job_id: JobId) -> None:
        job = self._jobs.pop(job_id)
        self._release = None
        if job.state is JobState.PENDING:
            self._wait_no_longer(job)
        self._forget(job_id)
        self._let_go(job_id)

    def _wait_no_longer(self, job: Job) -> None:
        self._conditional.pop(job.id, None)
        if self.waiting.group(job.id) is not None:
            self.waiting.remove(job)

    def _forget(self, job_id: JobId) -> None:
        for kept in (self.active, self.elastic, self._due):
            kept.pop(job_id, None)

    def _hold(self, job: Job) -> None:
        self.holding[job.id] = job
        self._stale[job.id] = None
        for node_id in job.nodes:
            self._on.setdefault(node_id, {})[job.id] = None
        self._changed.update(job.nodes)
        if self._accounts is not None:
            self._accounts.count(job, 1)

    def _let_go(self, job_id: JobId) -> None:
        job = self.holding.pop(job_id, None)
        if job is None:
            return
        self._occupants.pop(job_id, None)
        self._stale.pop(job_id, None)
        for node_id in set(job.nodes):
            del self._on[node_id][job_id]
        self._changed.update(job.nodes)
        if self._accounts is not None:
            self._accounts.count(job, -1)

    # -- what a decision reads ---------------------------------------------------------------------------------------

    def to_advance(self, now: float) -> list[Job]:
        """Return the active jobs to examine: their record is new, or the time that they waited for has come."""
        return [self.active[job_id] for job_id, at in self._due.items() if at <= now]

    def seen(self, job: Job, wake_at: float | None) -> None:
        """Record that nothing follows from the job's record before ``wake_at``; None: not before it changes."""
        if wake_at is None:
            self._due.pop(job.id, None)
        else:
            self._due[job.id] = wake_at

    def next_due(self) -> float | None:
        """Return the earliest time at which something follows from an unchanged record; None without one."""
        return min(self._due.values(), default=None)

    def release(self, ended: Mapping[JobId, JobState | None], now: float) -> Release:
        """Check the conditions of jobs; those that wait for free resources alone are in ``waiting`` until the next check."""
        known = self._release
        if known is None or known.failing or (known.wake_at is not None and known.wake_at <= now):
            for job in self._conditional.values():
                if self.waiting.group(job.id) is not None:
                    self.waiting.remove(job)
            known = self._release = check(self._conditional.values(), self.active.values(), self._jobs, ended, now)
            for job in known.released:
                self.waiting.add(job)
        return known

    def condition(self, job_id: JobId) -> Fact | None:
        """Return the condition that a job waits for, as of the last check; None without one."""
        return None if self._release is None else self._release.waiting.get(job_id)

    def conditions(self) -> Mapping[JobId, Fact]:
        """Return the conditions that jobs wait for, as of the last check."""
        return {} if self._release is None else self._release.waiting

    def occupants(self) -> Collection[Occupant]:
        """Return the jobs that hold gangs, with what decisions derive from their records."""
        for job_id in self._stale:
            self._occupants[job_id] = occupant_of(self.holding[job_id])
        self._stale.clear()
        return self._occupants.values()

    def free(self, nodes: Mapping[str, Node]) -> FreeNodes:
        """Return the resources that jobs leave free. The caller undoes its changes."""
        if nodes is not self._nodes:
            self._changed |= {i for i, n in nodes.items() if self._nodes.get(i) is not n and self._nodes.get(i) != n}
            for gone in self._free.keys() - nodes.keys():
                self._free.put(gone, None)
            self._nodes = nodes
            self._free.topology = topology_of(nodes.values())
        changed = self._changed & nodes.keys()
        there = {job_id for node_id in changed for job_id in self._on.get(node_id, ())}
        left = free_on((nodes[i] for i in changed), (self.holding[i] for i in there)) if changed else {}
        for node_id in changed:
            self._free.put(node_id, left.get(node_id))
        self._changed.clear()
        return self._free

    def accounts(self, half_life: float, now: float) -> Accounts:
        """Return what each queue and user holds."""
        if self._accounts is None or self._accounts.outdated(half_life, now):
            self._accounts = Accounts(self.holding.values(), half_life, now)
        return self._accounts

    def capacity(self, nodes: Mapping[str, Node]) -> Amounts:
        """Return the resources of the nodes, added up once while the nodes stay the same."""
        self._plan_for(nodes)
        return self._capacity

    def fits_ever(self, job: Job, group: Group, nodes: Mapping[str, Node]) -> bool:
        """Return ``could_ever_fit``, computed once for all equal gangs while the nodes stay the same."""
        self._plan_for(plain(nodes))
        kind = (group.shape, group.least, group.strategy)
        if kind not in self._fitting:
            self._fitting[kind] = could_ever_fit(job, nodes)
        return self._fitting[kind]

    def _plan_for(self, nodes: Mapping[str, Node]) -> None:
        if nodes is not self._plain:
            self._plain, self._capacity = nodes, capacity_of(nodes)
            self._fitting.clear()


class Reasons(Mapping[JobId, Fact]):
    """The reason why each job waits: its own, one shared by all skipped jobs of a group, or a condition.

    Jobs in ``placed`` wait no longer.
    """

    def __init__(self, jobs: LiveJobs | None = None) -> None:
        self.own: dict[JobId, Fact] = {}
        self.shared: dict[Group, Fact] = {}
        self.placed: set[JobId] = set()
        self._jobs = LiveJobs() if jobs is None else jobs

    def __setitem__(self, job_id: JobId, reason: Fact) -> None:
        self.own[job_id] = reason

    def __getitem__(self, job_id: JobId) -> Fact:
        if job_id in self.own:
            return self.own[job_id]
        group = self._jobs.waiting.group(job_id)
        if group is not None and job_id not in self.placed:
            return self.shared[group]
        reason = self._jobs.condition(job_id)
        if reason is None:
            raise KeyError(job_id)
        return reason

    def __iter__(self) -> Iterator[JobId]:
        yield from self.own
        for group in self.shared:
            for _, _, job in self._jobs.waiting.groups.get(group, ()):
                if job.id not in self.own and job.id not in self.placed:
                    yield job.id
        yield from (job_id for job_id in self._jobs.conditions() if job_id not in self.own)

    def __len__(self) -> int:
        return sum(1 for _ in self)
