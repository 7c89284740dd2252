"""What a waiting job waits for besides free resources: other jobs, its start time, a place in its matrix. Pure.

Dependencies are resolved to ids when a job is accepted, so they form no cycle: each is older than the job. They count
until its first attempt; the end of a prerequisite never changes. A job that is held back claims nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import AwaitsJob, AwaitsTime, MatrixAtLimit, PrerequisiteGone, PrerequisiteUnmet
from orchestrator.core.facts.requesters import ByMatrix
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core import events as ev
    from orchestrator.core.events import Prerequisite
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


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
