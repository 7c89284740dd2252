"""The fold: the only way a job's record changes.

Each event is folded once, by the daemon's loop. The store's rows are the folded record, written in the same transaction as
the event; ``store/verification.py`` folds stored events again, to compare. Facts may arrive twice (a restarted daemon asks
the actors again): folding one again changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.attempt import Attempt, Exit, Stop
from orchestrator.core.errors import BrokenRuleError, CoreError
from orchestrator.core.job import Job
from orchestrator.core.job_checkpoints import checkpoint_saved
from orchestrator.core.past_attempts import shorten
from orchestrator.core.states import AttemptState, FailureClass, JobState, StopPurpose, check_transition

if TYPE_CHECKING:
    from collections.abc import Mapping


STORY_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Change:
    """An event with the record before and after it. The event's number within its job is the version after it."""

    before: Job
    event: ev.Event
    after: Job


def submitted(event: ev.JobSubmitted, sequence: int) -> Job:
    """The record that a submission begins."""
    spec = event.spec
    return Job(
        id=event.job_id,
        sequence=sequence,
        version=1,
        name=event.name,
        spec=spec,
        user=event.user,
        uid=event.uid,
        submitted_at=event.at,
        idempotency_key=event.idempotency_key,
        python=event.python,
        path=event.path,
        work_dir=event.work_dir,
        snapshot=event.snapshot,
        resume_from=event.resume_from,
        rerun_of=event.rerun_of,
        priority=spec.priority,
        state=JobState.PENDING,
        state_since=event.at,
        reason="waiting to be placed",
        story=(f"{event.at:.3f} job_submitted",),
    )


def change_of(job: Job, event: ev.Event) -> Change | None:
    """What ``event`` changes; None where that is nothing. Raises what ``fold`` raises."""
    after = fold(job, event)
    return None if after is job else Change(job, event, after)


def fold(job: Job, event: ev.Event) -> Job:
    """The record after ``event``. Raises IllegalTransitionError for what the state table lacks."""
    if job.state.is_terminal and not isinstance(event, ev.JobNoted):
        return job  # terminal is absorbing: a late fact of a dead rank changes nothing
    after = _fold(event, job)
    if after is job:
        return job
    story = (
        *job.story[-STORY_LENGTH + 1 :],
        f"{event.at:.3f} {event.kind}" + (f" [{event.cause}]" if event.cause else ""),
    )
    return replace(after, version=job.version + 1, story=story)


@singledispatch
def _fold(event: ev.Event, job: Job) -> Job:
    raise CoreError(f"{type(event).__name__} cannot happen to job {job.id}, which exists")


def _to(job: Job, state: JobState, at: float, reason: str) -> Job:
    if state is job.state:
        return replace(job, reason=reason)
    check_transition(job.state, state, job.story)
    return replace(job, state=state, state_since=at, reason=reason)


def _with_attempt(job: Job, **changes: Any) -> Job:
    return replace(job, attempts=(*job.attempts[:-1], replace(job.attempts[-1], **changes)))


def _current(job: Job, attempt: int) -> bool:
    return bool(job.attempts) and job.attempts[-1].number == attempt


def _holds_nothing(job: Job, event: ev.Event) -> None:
    if job.gang_open or job.attempt_live:
        raise BrokenRuleError(job.id, f"{event.kind} while its gang is not confirmed gone", job.story)


@_fold.register
def _(event: ev.AttemptStarted, job: Job) -> Job:
    if event.attempt <= job.attempt_number:
        return job
    fresh = event.gang != job.gang
    if job.attempt_live or (fresh and job.gang_open):
        raise BrokenRuleError(job.id, "a second attempt while one is not confirmed gone", job.story)
    if not fresh and (job.gang_lost or not job.gang_open):
        raise BrokenRuleError(job.id, "an attempt in a gang that is gone", job.story)
    attempt = Attempt(
        number=event.attempt,
        gang=event.gang,
        state=AttemptState.STARTING,
        started_at=event.at,
        start_step=job.checkpoint_step,
        checkpoint_step=job.checkpoint_step,
        ranks=len(event.nodes),
    )
    job = _to(job, JobState.STARTING, event.at, "placing the gang" if fresh else "starting the ranks again")
    past, attempts = shorten(job.past, (*_without_log(job.attempts), attempt))
    return replace(
        job,
        attempts=attempts,
        past=past,
        gang=event.gang,
        gang_open=True,
        gang_lost=False,
        nodes=event.nodes,
        seats=() if fresh else job.seats,
        attempt_live=True,
        pids=(),
        exits=(),
        succeeded=False,
        retry=False,
        not_before=0.0,
        stop=None,
        degraded=job.degraded and not fresh,
    )


def _without_log(attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    # The events keep the lines; the record, which is written with every event, must stay small.
    if not attempts or attempts[-1].failure is None:
        return attempts
    return (*attempts[:-1], replace(attempts[-1], failure=replace(attempts[-1].failure, log_tail=())))


@_fold.register
def _(event: ev.GangPlaced, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open or job.gang_lost or job.seats == event.seats:
        return job
    return replace(
        job, seats=event.seats, reason="starting the ranks" if job.state is JobState.STARTING else job.reason
    )


@_fold.register
def _(event: ev.AttemptRunning, job: Job) -> Job:
    if not _current(job, event.attempt) or job.state is not JobState.STARTING:
        return job
    reason = job.reason if job.gang_lost else "every rank is up"
    job = _with_attempt(job, state=AttemptState.RUNNING, running_at=event.at)
    return replace(_to(job, JobState.RUNNING, event.at, reason), pids=event.pids)


@_fold.register
def _(event: ev.RankExited, job: Job) -> Job:
    if not _current(job, event.attempt) or not job.gang_open or any(e.rank == event.rank for e in job.exits):
        return job
    ended = Exit(**{f.name: getattr(event, f.name) for f in fields(Exit)})
    return replace(job, exits=(*job.exits, ended))


@_fold.register
def _(event: ev.GangLost, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open:
        return job
    if job.gang_lost and event.not_before <= job.fenced_until:
        return job  # nothing new; a second node that is cut off would be
    return replace(
        job,
        gang_lost=True,
        keep_gang=False,
        not_before=max(job.not_before, event.not_before),
        fenced_until=max(job.fenced_until, event.not_before),
        reason=job.reason if job.gang_lost else event.reason,
    )


@_fold.register
def _(event: ev.AttemptFailed, job: Job) -> Job:
    if not _current(job, event.attempt) or job.state not in (JobState.STARTING, JobState.RUNNING) or job.succeeded:
        return job
    failure_class = event.failure.failure_class
    preempted = failure_class is FailureClass.PREEMPTION
    job = _with_attempt(
        job,
        state=_failed_attempt(job, failure_class),
        ended_at=event.failed_at,
        failure=event.failure,
    )
    attempt = job.attempts[-1]
    restarts = dict(job.restarts)
    if event.retry:
        restarts[failure_class.value] = restarts.get(failure_class.value, 0) + 1
    progressed = attempt.progressed or job.checkpoint_step > attempt.start_step
    job = _to(job, JobState.RECOVERING, event.at, event.failure.sentence)
    return replace(
        job,
        retry=event.retry,
        keep_gang=event.keep_gang and not job.gang_lost,
        not_before=max(event.not_before, job.not_before),
        restarts=restarts,
        no_progress=(0 if progressed else job.no_progress) + int(event.retry and not preempted),
        failure=event.failure,
    )


def _failed_attempt(job: Job, failure_class: FailureClass) -> AttemptState:
    if failure_class is FailureClass.PREEMPTION:
        return AttemptState.PREEMPTED
    return AttemptState.LOST if failure_class is FailureClass.INFRA and job.gang_lost else AttemptState.FAILED


@_fold.register
def _(event: ev.AttemptSucceeded, job: Job) -> Job:
    if not _current(job, event.attempt) or job.state not in (JobState.RUNNING, JobState.DRAINING) or job.succeeded:
        return job
    job = _with_attempt(job, state=AttemptState.SUCCEEDED, ended_at=event.at)
    return replace(job, succeeded=True, attempt_live=False, reason="every rank ended with 0; releasing the GPUs")


@_fold.register
def _(event: ev.AttemptGone, job: Job) -> Job:
    if not _current(job, event.attempt) or not job.attempt_live:
        return job
    if job.state is JobState.DRAINING and job.attempts[-1].ended_at is None:
        job = _with_attempt(job, ended_at=event.at, state=_drained_attempt(job))
    return replace(job, attempt_live=False, pids=())


def _drained_attempt(job: Job) -> AttemptState:
    if job.stop is not None and job.stop.purpose is StopPurpose.PREEMPT:
        return AttemptState.PREEMPTED
    return AttemptState.ABORTED


@_fold.register
def _(event: ev.GangReleased, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open:
        return job
    if job.attempt_live:
        job = _fold(ev.AttemptGone(job_id=job.id, at=event.at, attempt=job.attempt_number), job)
    return replace(
        job,
        gang_open=False,
        gang_lost=False,
        keep_gang=False,
        seats=(),
        nodes=(),
        pids=(),
        degraded=False,
        checkpoint_step=job.durable_step,  # a newer one was in the memory of the actors that are gone
        checkpoint_at=job.durable_at,
    )


@_fold.register
def _(event: ev.StopRequested, job: Job) -> Job:
    if job.succeeded or (job.state is JobState.RECOVERING and not job.retry):
        return job  # its end is decided; only its gang has to go
    reason = _STOP_REASONS[event.purpose].format(by=event.by)
    if job.state is JobState.DRAINING and job.stop is not None:
        if not event.purpose.overrides(job.stop.purpose):
            return job
        # Its processes were told at the first stop: their time to save runs from there.
        deadline = min(job.stop.deadline, event.deadline)
        stop = Stop(purpose=event.purpose, by=event.by, at=job.stop.at, deadline=deadline)
        return replace(job, stop=stop, reason=reason)
    if job.attempt_live and job.attempts[-1].ended_at is None:
        job = _with_attempt(job, state=AttemptState.DRAINING)
    stop = Stop(purpose=event.purpose, by=event.by, at=event.at, deadline=event.deadline)
    return replace(_to(job, JobState.DRAINING, event.at, reason), stop=stop)


_STOP_REASONS: Mapping[StopPurpose, str] = {
    StopPurpose.CANCEL: "cancelled by {by}; its processes have time to save",
    StopPurpose.PAUSE: "paused by {by}; its processes have time to save",
    StopPurpose.PREEMPT: "making room ({by}); its processes have time to save",
    StopPurpose.TIMEOUT: "ran longer than max_duration; its processes have time to save",
    StopPurpose.RESIZE: "stopped by {by}; its processes have time to save",
}


@_fold.register
def _(event: ev.JobRequeued, job: Job) -> Job:
    if job.state is JobState.PENDING:
        return job
    _holds_nothing(job, event)
    job = _to(job, JobState.PENDING, event.at, event.reason)
    return replace(job, not_before=event.not_before, stop=None, retry=False, exits=(), succeeded=False)


@_fold.register
def _(event: ev.JobSuspended, job: Job) -> Job:
    if job.state is JobState.SUSPENDED:
        return job
    _holds_nothing(job, event)
    job = _to(job, JobState.SUSPENDED, event.at, f"paused by {event.by}")
    return replace(job, stop=None, retry=False, exits=(), succeeded=False)


@_fold.register
def _(event: ev.JobResumed, job: Job) -> Job:
    if job.state is JobState.PENDING:
        return job
    _holds_nothing(job, event)
    return replace(
        _to(job, JobState.PENDING, event.at, f"resumed by {event.by}"), not_before=0.0, stop=None, retry=False
    )


@_fold.register
def _(event: ev.JobFinished, job: Job) -> Job:
    _holds_nothing(job, event)
    if not event.state.is_terminal:
        raise BrokenRuleError(job.id, f"finished as {event.state}, which is no end", job.story)
    failure = _last_failure(job, event)
    job = _to(job, event.state, event.at, event.reason)
    return replace(job, ended_at=event.at, exit_code=event.exit_code, failure=failure, stop=None)


def _last_failure(job: Job, event: ev.JobFinished) -> ev.Failure | None:
    if event.state is not JobState.FAILED:
        return None
    if job.stop is not None and job.stop.purpose is StopPurpose.TIMEOUT:
        return ev.Failure(failure_class=FailureClass.TIMEOUT, code="max_duration", sentence=event.reason)
    return job.failure


@_fold.register
def _(event: ev.CheckpointSaved, job: Job) -> Job:
    return checkpoint_saved(event, job)


@_fold.register
def _(event: ev.FirstStep, job: Job) -> Job:
    if not _current(job, event.attempt) or job.attempts[-1].first_step_at is not None:
        return job
    return _with_attempt(job, first_step_at=event.step_at, first_step=event.step, steps_lost=event.steps_lost)


@_fold.register
def _(event: ev.JobUpdated, job: Job) -> Job:
    if event.priority == job.priority:
        return job
    return replace(job, priority=event.priority)


@_fold.register
def _(event: ev.JobNoted, job: Job) -> Job:
    degraded = job.degraded if event.degraded is None else event.degraded
    if degraded == job.degraded and job.notes[-1:] == (event.message,):
        return job
    return replace(job, degraded=degraded, notes=(*job.notes[-9:], event.message))
