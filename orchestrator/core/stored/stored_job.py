"""Converts a job to its stored form and back.

Records are stored flat, as in all versions: what a job's phase does not have is stored as before there were phases (no
gang: ``gang_open`` is false). Reading builds a phase from the flat values.
"""

from __future__ import annotations

# codec.py and conformance.py read the annotations at run time.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from orchestrator.core import events as ev  # noqa: TC001  # codec.py reads the annotations when it runs
from orchestrator.core.facts.fact import Fact  # noqa: TC001
from orchestrator.core.ids import JobId  # noqa: TC001
from orchestrator.core.job.attempt import Attempt, Exits, Stop
from orchestrator.core.job.checkpoints import Checkpoints, Durable, Saved
from orchestrator.core.job.past_attempts import Past
from orchestrator.core.job.phases import (
    Cancelled,
    Draining,
    Failed,
    Finishing,
    Gang,
    GivingUp,
    Leaving,
    LostGang,
    Pending,
    Replacing,
    Restarting,
    Running,
    Starting,
    Succeeded,
    Suspended,
)
from orchestrator.core.job.record import Job, Submission
from orchestrator.core.lifecycle.failure import gang_failure
from orchestrator.core.states import JobState
from orchestrator.spec.model import JobSpec  # noqa: TC001

if TYPE_CHECKING:
    from orchestrator.core.job.phases import Phase, Recovering


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The stored form of a job. ``retry`` to ``not_before`` are read in RECOVERING (``not_before`` in PENDING too)."""

    id: JobId
    sequence: int
    version: int
    name: str
    spec: JobSpec
    user: str
    uid: int
    submitted_at: float
    idempotency_key: str
    python: str
    path: str
    work_dir: str
    snapshot: str
    resume_from: str | None
    rerun_of: str | None
    priority: int
    state: JobState
    state_since: float
    reason: Fact
    attempts: tuple[Attempt, ...] = ()
    past: Past = field(default_factory=Past)
    gang: int = 0
    gang_open: bool = False
    gang_lost: bool = False
    nodes: tuple[str, ...] = ()
    files_on: tuple[str, ...] = ()
    seats: tuple[ev.Seat, ...] = ()
    attempt_live: bool = False
    pids: tuple[int, ...] = ()
    exits: tuple[ev.Exit, ...] = ()
    succeeded: bool = False
    retry: bool = False
    keep_gang: bool = False
    not_before: float = 0.0
    stop: Stop | None = None
    asked_until: float | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    no_progress: int = 0
    checkpoint_step: int = 0
    checkpoint_at: float | None = None
    checkpoint_path: str = ""
    checkpoint_digest: str = ""
    durable_step: int = 0
    durable_at: float | None = None
    durable_every: float | None = None
    fenced_until: float = 0.0
    limit_since: float | None = None
    later_attempt: int = 0
    later_gang: int = 0
    failure: ev.Failure | None = None
    degraded: bool = False
    notes: tuple[Fact, ...] = ()
    findings: tuple[Fact, ...] = ()
    ended_at: float | None = None
    exit_code: int | None = None
    story: tuple[str, ...] = ()
    prerequisites: tuple[ev.Prerequisite, ...] = ()
    matrix: ev.MatrixCell | None = None


def record_of(job: Job) -> JobRecord:
    """Return the stored form of a job."""
    return JobRecord(
        **dict(zip(_READ_FROM, _read(job), strict=True)),
        exits=tuple(job.exits),
        asked_until=job.phase.deadline if isinstance(job.phase, Leaving) else None,
        retry=isinstance(job.phase, Restarting | Replacing),
        keep_gang=isinstance(job.phase, Restarting),
    )


_READ_FROM: dict[str, str] = (
    {f.name: f.name for f in fields(JobRecord) if f.name not in ("exits", "asked_until", "retry", "keep_gang")}
    | {f.name: f"submission.{f.name}" for f in fields(Submission)}
    | {
        "checkpoint_step": "checkpoints.step",
        "checkpoint_at": "checkpoints.at",
        "checkpoint_path": "checkpoints.path",
        "checkpoint_digest": "checkpoints.digest",
        "durable_step": "checkpoints.durable_step",
        "durable_at": "checkpoints.durable_at",
        "durable_every": "checkpoints.durable_every",
    }
)
_read = attrgetter(*_READ_FROM.values())


def job_of(record: JobRecord, *, unusable: tuple[str, ...] = ()) -> Job:
    """Return the job of its stored form. Raises ValueError and BrokenRuleError for values that no job can have together."""
    return Job(
        submission=Submission(**{f.name: getattr(record, f.name) for f in fields(Submission)}),
        version=record.version,
        priority=record.priority,
        phase=_phase(record),
        state_since=record.state_since,
        reason=record.reason,
        attempts=record.attempts,
        past=record.past,
        restarts=record.restarts,
        no_progress=record.no_progress,
        checkpoints=_checkpoints(record),
        fenced_until=record.fenced_until,
        limit_since=record.limit_since,
        later_attempt=record.later_attempt,
        later_gang=record.later_gang,
        notes=record.notes,
        findings=record.findings,
        story=record.story,
        unusable=unusable,
    )


def _phase(r: JobRecord) -> Phase:
    match r.state:
        case JobState.PENDING:
            return Pending(not_before=max(r.not_before, r.fenced_until), failure=r.failure)
        case JobState.STARTING:
            return Starting(gang=_gang(r), exits=Exits(r.exits), failure=r.failure)
        case JobState.RUNNING:
            return _running(r)
        case JobState.RECOVERING:
            return _recovering(r)
        case JobState.DRAINING:
            if r.stop is None:
                raise ValueError(f"job {r.id} drains, and its record has no stop")
            return Draining(gang=_gang(r), files_on=r.files_on, exits=Exits(r.exits), failure=r.failure, stop=r.stop)
        case JobState.SUSPENDED:
            return Suspended(failure=r.failure)
        case JobState.SUCCEEDED:
            return Succeeded()
        case JobState.FAILED:
            return Failed(exit_code=r.exit_code, failure=r.failure)
        case JobState.CANCELLED:
            return Cancelled()


def _running(r: JobRecord) -> Running | Leaving | Finishing:
    gang, exits = _gang(r), Exits(r.exits)
    if r.succeeded:
        return Finishing(gang=gang, files_on=r.files_on, exits=exits, failure=r.failure)
    if r.asked_until is not None:
        return Leaving(gang=gang, exits=exits, failure=r.failure, deadline=r.asked_until)
    return Running(gang=gang, exits=exits, failure=r.failure)


def _gang(r: JobRecord) -> Gang | LostGang | None:
    if not r.gang_open:
        return None
    pids = r.pids if r.attempt_live else None
    return (LostGang if r.gang_lost else Gang)(nodes=r.nodes, seats=r.seats, pids=pids, degraded=r.degraded)


def _recovering(r: JobRecord) -> Recovering:
    gang = _gang(r)
    failure = r.failure or gang_failure(r.reason)
    not_before = max(r.not_before, r.fenced_until)
    if not r.retry:
        return GivingUp(gang=gang, files_on=r.files_on, exits=Exits(r.exits), failure=failure)
    if r.keep_gang and isinstance(gang, Gang):
        return Restarting(gang=gang, exits=Exits(r.exits), failure=failure, not_before=not_before)
    return Replacing(gang=gang, files_on=r.files_on, exits=Exits(r.exits), failure=failure, not_before=not_before)


def _checkpoints(r: JobRecord) -> Checkpoints:
    durable = None
    if r.durable_at is not None:
        durable = Durable(
            step=r.durable_step,
            at=r.durable_at,
            path=r.checkpoint_path,
            digest=r.checkpoint_digest,
            every=r.durable_every,
        )
    if r.checkpoint_at is not None:
        return Checkpoints(newest=Saved(step=r.checkpoint_step, at=r.checkpoint_at), durable=durable)
    newest = None if durable is None else Saved(step=durable.step, at=durable.at)
    return Checkpoints(newest=newest, durable=durable)
