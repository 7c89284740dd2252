"""What follows from one job's record alone: the events of its next step, of a request to stop it, of a hang; and the effect that it requires of the runtime.

No rule here uses another job or a node; ``scheduler/`` decides what needs them. Each function of the first part returns events to
write, or none where nothing follows. The clock is an argument. Effects are in one table, by the job's phase and what it holds. Every
effect is idempotent: a restarted daemon derives and orders it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec.structs import replace

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import MaxDuration, NoExitStatus, StartupTimeout
from orchestrator.core.facts.findings import Hang, Sign
from orchestrator.core.facts.reasons import (
    ByForce,
    ByIdleReclaim,
    ByLimit,
    ByUser,
    Cancelled,
    MadeRoom,
    OthersAsked,
    PlacedAnew,
    RanksSucceeded,
)
from orchestrator.core.job import record as p
from orchestrator.core.job.record import (
    Draining,
    Finishing,
    GivingUp,
    Hold,
    Leaving,
    Replacing,
    Restarting,
    Running,
    Starting,
    hold_of,
)
from orchestrator.core.lifecycle.failure import (
    classify,
    decide_retry,
    ended_alone,
    follow_until,
    gang_failure,
    stop_failure,
)
from orchestrator.core.states import FailureClass, JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job, Recovering


class Step(NamedTuple):
    """The events that follow from a record, and the latest time of the next call; None: after the next folded event."""

    events: tuple[ev.Event, ...] = ()
    wake_at: float | None = None


_NOTHING = Step()
FORCE_SECONDS = 60.0
"""Time after which a job that is ending may be given up: as long as a node is asked whether ranks have ended."""

FOLLOWING_SECONDS = 10.0
"""Time in which ranks of one node leave after the same step and write a last checkpoint, without a request."""


def advance(job: Job, now: float) -> Step:
    """Return the step that follows from the record of a job that may hold a gang, at wall time ``now``."""
    if job.files_on:
        return _NOTHING
    match job.phase:
        case Starting() | Running() | Leaving() as phase:
            return _advance_live(job, phase, now)
        case Finishing(gang=None):
            return Step((_finished(job, now),))
        case Restarting() | Replacing() | GivingUp() as phase:
            return _advance_recovering(job, phase, now)
        case Draining() as phase:
            return _advance_draining(job, phase, now)
        case _:
            return _NOTHING


def request_stop(job: Job, purpose: StopPurpose, by: Fact, now: float) -> list[ev.Event]:
    """Return the events of a user's cancel or pause, or of the scheduler's own stop.

    Empty when the stop is already requested, or when the job's end is decided and only its gang must be released.
    """
    if job.state is JobState.PENDING or (job.state is JobState.SUSPENDED and purpose is StopPurpose.CANCEL):
        if purpose is StopPurpose.CANCEL:
            return [ev.JobFinished(job_id=job.id, at=now, state=JobState.CANCELLED, reason=Cancelled(by=by))]
        return [ev.JobSuspended(job_id=job.id, at=now, by=by)] if purpose is StopPurpose.PAUSE else []
    if job.state.is_terminal or job.state is JobState.SUSPENDED:
        return []
    if job.stop is not None and not purpose.overrides(job.stop.purpose):
        return []
    if job.succeeded or isinstance(job.phase, GivingUp):
        return []
    deadline = now + job.spec.stop_duration.total_seconds()
    return [ev.StopRequested(job_id=job.id, at=now, purpose=purpose, by=by, deadline=deadline)]


def request_force(job: Job, name: str, now: float) -> list[ev.Event]:
    """Return the events of a forced cancel by the daemon's owner.

    First the processes are killed now, without time to save. Once a job has been ending for FORCE_SECONDS without a confirmed end of its
    gang, the gang is given up. Until then there is nothing more to do than to wait: empty.
    """
    if not job.gang_open:
        return request_stop(job, StopPurpose.CANCEL, ByUser(name=name), now)
    since = ending_since(job)
    if since is not None and now >= since + FORCE_SECONDS:
        return [ev.GangAbandoned(job_id=job.id, at=now, gang=job.gang, by=ByForce(name=name))]
    if job.succeeded or isinstance(job.phase, GivingUp):
        return []
    stop = job.stop
    if stop is not None and stop.purpose is StopPurpose.CANCEL and stop.deadline <= now:
        return []
    by, cancel = ByUser(name=name), StopPurpose.CANCEL
    return [ev.StopRequested(job_id=job.id, at=now, purpose=cancel, by=by, deadline=now)]


def ending_since(job: Job) -> float | None:
    """Return since when nothing but the end of its gang is missing for the job's next state; None while its ranks may run."""
    match job.phase:
        case Draining(gang=held, stop=stop) if held is not None:
            return stop.deadline
        case Finishing() | Restarting() | Replacing() | GivingUp():
            return job.attempts[-1].ended_at
        case _:
            return None


def request_resume(job: Job, by: str, now: float) -> list[ev.Event] | None:
    """Return the events of a user's resume: empty when the job waits or runs already, None when it drains or has ended."""
    if job.state is JobState.SUSPENDED:
        return [ev.JobResumed(job_id=job.id, at=now, by=by)]
    return None if job.state is JobState.DRAINING or job.state.is_terminal else []


def declare_hung(job: Job, failure: ev.Failure, failed_at: float, now: float) -> list[ev.Event]:
    """Return the events that end an attempt hung since ``failed_at``; empty when it has ended, or is ending, by itself.

    Ranks that wait for one that has left hang for the reason that made it leave; those that wait for one that ended with 0, because of it.
    """
    if job.state is not JobState.RUNNING or job.succeeded or job.gang_lost or any(not e.ok for e in job.exits):
        return []
    left, hang = job.left_early, failure.cause
    if left:
        failure = stop_failure(left)
    elif isinstance(hang, Hang) and hang.seen.sign in (Sign.COLLECTIVE, Sign.RENDEZVOUS):
        failure = ended_alone(job, waiting=hang.seen.rank, since=math.inf) or failure
    return [_failed(job, failure, failed_at, now)]


def is_returning(job: Job) -> bool:
    """Whether the job was stopped only to restart on another number of ranks."""
    return isinstance(job.phase, Draining) and job.phase.stop.purpose.returns


def returns(job: Job, now: float) -> bool:
    """Whether an elastic job holds nothing any more and continues at once, on as many ranks as fit."""
    if job.gang_open or job.files_on or job.succeeded or job.not_before > now:
        return False
    return job.elastic is not None and (isinstance(job.phase, Replacing) or is_returning(job))


def wants_gang(job: Job, now: float) -> bool:
    """Whether a gang is to be placed for the job as soon as it fits."""
    if job.state is JobState.DRAINING and _ended_by_itself(job):
        return False
    return job.state is JobState.PENDING or returns(job, now)


def _advance_live(job: Job, phase: Starting | Running | Leaving, now: float) -> Step:
    if phase.exits and phase.ended_well(job.num_workers):
        return Step((_all_ended_well(job, now),))
    found = classify(job, now)
    if found is not None and not isinstance(found, float):
        return Step((_failed(job, found.failure, found.failed_at, now),))
    if found is None and job.gang_lost:
        return Step((_failed(job, gang_failure(job.reason), now, now),))
    if found is None and not job.attempt_live:
        return Step((_failed(job, gang_failure(NoExitStatus()), now, now),))
    if found is not None and isinstance(phase, Running) and phase.left_early:
        asked_at = min(e.heard_at for e in phase.left_early) + FOLLOWING_SECONDS
        if now >= asked_at:
            return Step((_others_asked(job, phase.left_early, now),))
        found = min(found, asked_at)
    return _check_deadlines(job, now, found)


def _others_asked(job: Job, left: tuple[ev.Exit, ...], now: float) -> ev.RanksAsked:
    """Return the event that asks the other nodes' ranks to stop: without it they train on until killed, or wait in a collective."""
    reason = OthersAsked(cause=stop_failure(left).cause)
    return ev.RanksAsked(
        job_id=job.id, at=now, attempt=job.attempt_number, reason=reason, deadline=follow_until(job, left)
    )


def _all_ended_well(job: Job, now: float) -> ev.Event:
    if job.state is JobState.STARTING:  # they ended before all were known to be up
        return ev.AttemptRunning(job_id=job.id, at=now, attempt=job.attempt_number, pids=())
    return ev.AttemptSucceeded(job_id=job.id, at=now, attempt=job.attempt_number)


def _check_deadlines(job: Job, now: float, wake_at: float | None) -> Step:
    if job.state is JobState.STARTING:
        startup = job.spec.health.startup_timeout.total_seconds()
        limit = job.attempts[-1].started_at + startup
        if now >= limit:
            failure = ev.Failure(failure_class=FailureClass.INFRA, cause=StartupTimeout(limit_seconds=startup))
            return Step((_failed(job, failure, now, now),))
        wake_at = _sooner(wake_at, limit)
    if job.spec.max_duration is not None and job.limit_since is not None:
        limit = job.limit_since + job.spec.max_duration.total_seconds()
        if now >= limit:
            return Step(tuple(request_stop(job, StopPurpose.TIMEOUT, ByLimit(key="max_duration"), now)), wake_at)
        wake_at = _sooner(wake_at, limit)
    return _NOTHING if wake_at is None else Step(wake_at=wake_at)


def _sooner(known: float | None, at: float) -> float:
    return at if known is None else min(known, at)


def _failed(job: Job, failure: ev.Failure, failed_at: float, now: float) -> ev.AttemptFailed:
    """Return the end of the attempt. A rank can report any time of its failure: one outside the attempt is clamped to it."""
    retry = decide_retry(job, failure, now)
    failed_at = max(job.attempts[-1].started_at, min(failed_at, now))
    return ev.AttemptFailed(
        job_id=job.id,
        at=now,
        attempt=job.attempt_number,
        failure=replace(failure, refusal=retry.refusal),
        failed_at=failed_at,
        retry=retry.retry,
        keep_gang=retry.keep_gang,
        not_before=retry.not_before,
    )


def _advance_recovering(job: Job, phase: Recovering, now: float) -> Step:
    if isinstance(phase, Restarting):
        return _restart(job, phase, now)
    if phase.gang is not None or returns(job, now):
        return _NOTHING
    if isinstance(phase, GivingUp):
        return Step((_finished(job, now),))
    reason = PlacedAnew(cause=phase.failure.reason)
    return Step((ev.JobRequeued(job_id=job.id, at=now, reason=reason, not_before=phase.not_before),))


def _restart(job: Job, phase: Restarting, now: float) -> Step:
    """Return the start of the next attempt in the same gang, when the last one's processes have ended and the delay is over."""
    if phase.gang.pids is not None:
        return _NOTHING
    if now < phase.not_before:
        return Step(wake_at=phase.not_before)
    number, nodes = job.next_attempt, phase.gang.nodes
    return Step((ev.AttemptStarted(job_id=job.id, at=now, attempt=number, gang=job.gang, nodes=nodes),))


def _advance_draining(job: Job, phase: Draining, now: float) -> Step:
    if _ended_by_itself(job) and not job.succeeded:
        return Step((ev.AttemptSucceeded(job_id=job.id, at=now, attempt=job.attempt_number),))
    if phase.gang is not None:
        return _NOTHING
    if job.succeeded:
        return Step((_finished(job, now),))
    return _NOTHING if returns(job, now) else Step((_after_stop(job, phase, now),))


def _after_stop(job: Job, phase: Draining, now: float) -> ev.Event:
    by = phase.stop.by
    match phase.stop.purpose:
        case StopPurpose.CANCEL:
            return ev.JobFinished(job_id=job.id, at=now, state=JobState.CANCELLED, reason=Cancelled(by=by))
        case StopPurpose.PAUSE:
            return ev.JobSuspended(job_id=job.id, at=now, by=by)
        case StopPurpose.TIMEOUT:
            limit = job.spec.max_duration
            reason = MaxDuration(limit_seconds=limit.total_seconds() if limit else 0.0)
            return ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=reason)
        case StopPurpose.PREEMPT | StopPurpose.RESIZE:
            # A job that lost its idle GPUs would get them back at once: it is the older one most often.
            again = now + by.seconds if isinstance(by, ByIdleReclaim) else 0.0
            not_before = max(job.fenced_until, again)
            return ev.JobRequeued(job_id=job.id, at=now, reason=MadeRoom(by=by), not_before=not_before)


def _ended_by_itself(job: Job) -> bool:
    """Whether every rank ended well before the order to stop reached it, and the attempt was not known to have failed."""
    return job.ended_well and job.attempts[-1].failure is None and all(e.ordered is None for e in job.exits)


def _finished(job: Job, now: float) -> ev.JobFinished:
    if job.succeeded:
        return ev.JobFinished(job_id=job.id, at=now, state=JobState.SUCCEEDED, reason=RanksSucceeded(), exit_code=0)
    failure = job.failure
    code = failure.exit_code if failure else None
    if failure is not None and code is None and failure.signal is not None:
        code = 128 + failure.signal
    reason = failure.reason if failure else job.reason
    return ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=reason, exit_code=code or 1)


@dataclass(frozen=True, slots=True)
class Ensure:
    """The attempt's gang exists, its ranks have been launched once, and they are watched."""

    job_id: JobId
    attempt: int
    gang: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """Every rank gets SIGTERM, and whole process trees SIGKILL at ``deadline`` (wall time); the ranks stay watched."""

    job_id: JobId
    attempt: int
    gang: int
    deadline: float


@dataclass(frozen=True, slots=True)
class KillRanks:
    """Every process of the attempt is killed now, and confirmed to have ended."""

    job_id: JobId
    attempt: int
    gang: int


@dataclass(frozen=True, slots=True)
class ReleaseGang:
    """Actors and placement group are removed or no longer serve the job, and no process of the gang is left."""

    job_id: JobId
    gang: int


@dataclass(frozen=True, slots=True)
class CollectFiles:
    """Logs and outputs of a released gang are in the home, or are given up."""

    job_id: JobId
    gang: int


Effect: TypeAlias = Ensure | StopRanks | KillRanks | ReleaseGang | CollectFiles
_Kind: TypeAlias = type[Ensure] | type[StopRanks] | type[KillRanks] | type[ReleaseGang] | type[CollectFiles]

_NO_EFFECT: Mapping[Hold, _Kind | None] = {Hold.NOTHING: None}
_LIVE: Mapping[Hold, _Kind | None] = {
    Hold.NOTHING: None,
    Hold.PROCESSES: Ensure,
    Hold.ACTORS: Ensure,
    Hold.LOST: None,  # the attempt's failure follows
}
_ENDING: Mapping[Hold, _Kind | None] = {
    Hold.NOTHING: None,
    Hold.PROCESSES: KillRanks,
    Hold.ACTORS: ReleaseGang,
    Hold.LOST: ReleaseGang,
    Hold.FILES: CollectFiles,
}

EFFECTS: Mapping[type[p.Phase], Mapping[Hold, _Kind | None]] = {
    p.Pending: _NO_EFFECT,
    p.Starting: _LIVE,
    p.Running: _LIVE,
    p.Leaving: {**_LIVE, Hold.PROCESSES: StopRanks},
    p.Finishing: {kind: effect for kind, effect in _ENDING.items() if kind is not Hold.PROCESSES},
    p.Restarting: {Hold.PROCESSES: KillRanks, Hold.ACTORS: None},
    p.Replacing: _ENDING,
    p.GivingUp: _ENDING,
    p.Draining: {**_ENDING, Hold.PROCESSES: StopRanks},
    p.Suspended: _NO_EFFECT,
    p.Succeeded: _NO_EFFECT,
    p.Failed: _NO_EFFECT,
    p.Cancelled: _NO_EFFECT,
}
"""The effect of each phase, by what the job holds. A missing entry is impossible: no value of the phase holds it."""


def desired_effect(job: Job) -> Effect | None:
    """Return the effect that the record requires, whatever was done before."""
    kind = EFFECTS[type(job.phase)][hold_of(job.phase)]
    if kind is None:
        return None
    if kind is ReleaseGang or kind is CollectFiles:
        return kind(job.id, job.gang)
    if kind is StopRanks and isinstance(job.phase, p.Draining | p.Leaving):
        deadline = job.phase.deadline if isinstance(job.phase, p.Leaving) else job.phase.stop.deadline
        return StopRanks(job.id, job.attempt_number, job.gang, deadline)
    return (Ensure if kind is Ensure else KillRanks)(job.id, job.attempt_number, job.gang)


def table() -> str:
    """Return the table in Markdown, for the documentation."""
    names: dict[_Kind | None, str] = {
        None: "-",
        Ensure: "ensure",
        StopRanks: "stop ranks",
        KillRanks: "kill ranks",
        ReleaseGang: "release gang",
        CollectFiles: "collect files",
    }
    lines = ["| state | phase | " + " | ".join(Hold) + " |", "|---|---|" + "---|" * len(Hold)]
    for phase, row in EFFECTS.items():
        cells = [names[row[hold]] if hold in row else "" for hold in Hold]
        lines.append(f"| {phase.state} | {phase.__name__} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
