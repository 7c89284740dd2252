"""The fold: the only way a job's record changes.

The daemon's loop folds each event once. The store's rows are the folded record, written in the same transaction as the
event; ``store/verification.py`` folds stored events again, to compare. Facts may be repeated (a restarted daemon calls
the actors again): a repeated fold changes nothing.

A step of the daemon's clock moves what is measured until now, or is due. What has ended keeps the times of its own clock: recordings
and logs of that time have them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from orchestrator.core import events as ev
from orchestrator.core.diagnosis.definitions import definition_of
from orchestrator.core.errors import BrokenRuleError, CoreError
from orchestrator.core.facts import reasons
from orchestrator.core.facts.faults import RecordRestored
from orchestrator.core.facts.findings import Finding, key_of
from orchestrator.core.job.record import (
    Attempt,
    Cancelled,
    Checkpoints,
    Draining,
    Durable,
    Exits,
    Failed,
    Finishing,
    Gang,
    GivingUp,
    Holding,
    Job,
    Leaving,
    LostGang,
    Pending,
    Replacing,
    Restarting,
    Running,
    Saved,
    Starting,
    Stop,
    Submission,
    Succeeded,
    Suspended,
    shorten,
)
from orchestrator.core.states import AttemptState, FailureClass, JobState, StopPurpose, check_transition
from orchestrator.core.thresholds import MAX_FINDINGS

if TYPE_CHECKING:
    from orchestrator.core.events import CheckpointSaved, ClockStepped
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Ended, HoldingPhase, Phase, Recovering


def clock_stepped(event: ClockStepped, job: Job) -> Job:
    """Return the record after ``event``; ``job`` itself where it changes nothing."""
    by = event.seconds
    since = job.limit_since
    if not by:
        return job if since is None or not event.unmeasured else replace(job, limit_since=since + event.unmeasured)
    attempts = job.attempts
    if attempts and attempts[-1].ended_at is None:
        attempts = (*attempts[:-1], _attempt(attempts[-1], by))
    return replace(
        job,
        phase=_phase(job.phase, by),
        state_since=_moved(job.state_since, by),
        fenced_until=_due(job.fenced_until, by),
        limit_since=None if since is None else _moved(since, by + event.unmeasured),
        attempts=attempts,
        checkpoints=_checkpoints(job.checkpoints, by),
    )


def _moved(at: float, by: float) -> float:
    return max(0.0, at + by)


def _due(at: float, by: float) -> float:
    """Return a due time after the step; 0 stands for none."""
    return _moved(at, by) if at else 0.0


def _attempt(attempt: Attempt, by: float) -> Attempt:
    times: dict[str, Any] = {name: getattr(attempt, name) for name in ("started_at", "running_at", "first_step_at")}
    moved: dict[str, Any] = {name: _moved(at, by) for name, at in times.items() if at is not None}
    return replace(attempt, **moved)


def _checkpoints(known: Checkpoints, by: float) -> Checkpoints:
    newest, durable = known.newest, known.durable
    return replace(
        known,
        newest=None if newest is None else replace(newest, at=_moved(newest.at, by)),
        durable=None if durable is None else replace(durable, at=_moved(durable.at, by)),
    )


def _phase(phase: Phase, by: float) -> Phase:
    if isinstance(phase, Holding) and phase.exits:
        phase = replace(phase, exits=Exits(replace(e, heard_at=_moved(e.heard_at, by)) for e in phase.exits))
    match phase:
        case Pending() | Restarting() | Replacing():
            return replace(phase, not_before=_due(phase.not_before, by))
        case Leaving():
            return replace(phase, deadline=_moved(phase.deadline, by))
        case Draining(stop=stop):
            return replace(phase, stop=replace(stop, at=_moved(stop.at, by), deadline=_moved(stop.deadline, by)))
        case _:
            return phase


def checkpoint_saved(event: CheckpointSaved, job: Job) -> Job:
    """Return the record after ``event``; ``job`` itself where it changes nothing."""
    return _script_saved(event, job) if event.digest else _context_saved(event, job)


def _context_saved(event: CheckpointSaved, job: Job) -> Job:
    """Fold a checkpoint of orch's own format. Its step determines whether it is newer."""
    if event.attempt != job.attempt_number:
        return job  # fenced: only the current attempt's checkpoints count
    if not event.path and not job.gang_open:
        return job  # it was lost with the actors that had it in memory
    newest, durable = _newest(event, job.checkpoints), _durable(event, job)
    if newest is job.checkpoints.newest and durable is job.checkpoints.durable:
        return job
    attempts, no_progress = job.attempts, job.no_progress
    if attempts and newest is not job.checkpoints.newest:
        progressed = attempts[-1].progressed or event.step > attempts[-1].start_step
        attempts = _with_last(attempts, replace(attempts[-1], checkpoint_step=event.step, progressed=progressed))
        no_progress = 0 if progressed else no_progress
    checkpoints = Checkpoints(newest=newest, durable=durable)
    return replace(job, attempts=attempts, no_progress=no_progress, checkpoints=checkpoints)


def _newest(event: CheckpointSaved, before: Checkpoints) -> Saved:
    if before.newest is not None and event.step <= before.newest.step:
        return before.newest
    return Saved(step=event.step, at=event.at)


def _durable(event: CheckpointSaved, job: Job) -> Durable | None:
    known = job.checkpoints.durable
    if not event.path or (known is not None and event.step <= known.step):
        return known
    digest = known.digest if known is not None else ""
    return Durable(step=event.step, at=event.at, path=event.path, digest=digest, every=_since_the_last(event, job))


def _since_the_last(event: CheckpointSaved, job: Job) -> float | None:
    """Return the seconds since the checkpoint on storage before it; None if another attempt wrote that."""
    known, began = job.checkpoints.durable, job.attempts[-1].running_at if job.attempts else None
    if known is None or began is None or known.at < began or event.at <= known.at:
        return None
    return event.at - known.at


def _script_saved(event: CheckpointSaved, job: Job) -> Job:
    """Fold a file of the script's own: newer by its content and time, whatever number its name has.

    A file of an ended attempt may be found just before the next one starts: that one begins with it.
    """
    if not job.attempts or not job.attempt_number - 1 <= event.attempt <= job.attempt_number:
        return job
    if not _is_new(event, job):
        return job
    current = job.attempts[-1]
    if event.attempt == job.attempt_number:
        current = replace(current, checkpoint_step=event.step, progressed=True)
    else:
        current = replace(current, checkpoint_step=event.step, start_step=event.step)
    every = _since_the_last(event, job)
    found = Durable(step=event.step, at=event.at, path=event.path, digest=event.digest, every=every)
    checkpoints = Checkpoints(newest=Saved(step=event.step, at=event.at), durable=found)
    return replace(job, attempts=_with_last(job.attempts, current), no_progress=0, checkpoints=checkpoints)


def _is_new(event: CheckpointSaved, job: Job) -> bool:
    durable = job.checkpoints.durable
    if durable is None:
        return True
    if event.digest == durable.digest:
        return False
    # The first file of an attempt may have its time from another node's clock than the file before.
    first = event.attempt == job.attempt_number and not job.attempts[-1].progressed
    return first or event.at > durable.at


def _with_last(attempts: tuple[Attempt, ...], last: Attempt) -> tuple[Attempt, ...]:
    return (*attempts[:-1], last)


def gang_changed(phase: HoldingPhase, **changes: Any) -> HoldingPhase:
    """Return the phase with these changes to its gang, if it has one."""
    if isinstance(phase, Restarting):
        return replace(phase, gang=replace(phase.gang, **changes))
    return phase if phase.gang is None else replace(phase, gang=replace(phase.gang, **changes))


def losing(phase: HoldingPhase, gang: Gang | LostGang, fenced_until: float) -> Phase:
    """Return the phase once a part of its gang is lost; a job on a fenced node is not placed before ``fenced_until``."""
    lost = LostGang(nodes=gang.nodes, seats=gang.seats, pids=gang.pids, degraded=gang.degraded)
    if isinstance(phase, Restarting | Replacing):
        return replacing(phase, lost, max(phase.not_before, fenced_until))
    return replace(phase, gang=lost)


def replacing(phase: Restarting | Replacing, gang: Gang | LostGang | None, not_before: float) -> Replacing:
    """Return the phase in which the job waits for another gang, after this one is released."""
    return Replacing(
        gang=gang, files_on=phase.files_on, exits=phase.exits, failure=phase.failure, not_before=not_before
    )


def recovering(phase: Starting | Running | Leaving, event: ev.AttemptFailed, fenced_until: float) -> Recovering:
    """Return the phase after an attempt that failed."""
    gang, exits, failure = phase.gang, phase.exits, event.failure
    not_before = max(event.not_before, fenced_until)
    if not event.retry:
        return GivingUp(gang=gang, exits=exits, failure=failure)
    if event.keep_gang and isinstance(gang, Gang):
        return Restarting(gang=gang, exits=exits, failure=failure, not_before=not_before)
    return Replacing(gang=gang, exits=exits, failure=failure, not_before=not_before)


def leaving(phase: Running, deadline: float) -> Leaving:
    """Return the phase in which the ranks that still run are asked to stop."""
    return Leaving(gang=phase.gang, exits=phase.exits, failure=phase.failure, deadline=deadline)


def finding_opened(event: ev.FindingOpened, job: Job) -> Job:
    """Add an open finding, if its attempt is the current one and it is not open yet."""
    finding = event.finding
    if not isinstance(finding, Finding) or event.attempt != job.attempt_number or len(job.findings) >= MAX_FINDINGS:
        return job
    known = {key_of(one) for one in job.findings if isinstance(one, Finding)}
    return job if key_of(finding) in known else replace(job, findings=(*job.findings, finding))


def finding_closed(event: ev.FindingClosed, job: Job) -> Job:
    """Remove a finding."""
    if not isinstance(event.finding, Finding):
        return job
    closed = key_of(event.finding)
    left = tuple(one for one in job.findings if not (isinstance(one, Finding) and key_of(one) == closed))
    return replace(job, findings=left) if len(left) < len(job.findings) else job


def without_ended(before: Job, after: Job) -> Job:
    """Return the record after an event, without the findings that ended with it."""
    if not after.findings:
        return after
    if after.state.is_terminal:
        return replace(after, findings=())
    if before.attempt_number == after.attempt_number and (after.attempt_live or not before.attempt_live):
        return after
    kept = tuple(one for one in after.findings if isinstance(one, Finding) and definition_of(one).outlives)
    return replace(after, findings=kept) if len(kept) < len(after.findings) else after


STORY_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Change:
    """An event with the record before and after it. Its number within the job is the version after it."""

    before: Job
    event: ev.Event
    after: Job


def submitted(event: ev.JobSubmitted, sequence: int) -> Job:
    """Return the record of a submission."""
    submission = Submission(
        id=event.job_id,
        sequence=sequence,
        name=event.name,
        spec=event.spec,
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
        prerequisites=event.prerequisites,
        matrix=event.matrix,
        spec_bytes=event.spec_bytes,
    )
    return Job(
        submission=submission,
        version=1,
        priority=event.spec.priority,
        phase=Suspended() if event.spec.hold else Pending(),
        state_since=event.at,
        reason=reasons.Paused(by=reasons.ByHold(name=event.user)) if event.spec.hold else reasons.Queued(),
        story=(f"{event.at:.3f} job_submitted",),
    )


def change_of(job: Job, event: ev.Event) -> Change | None:
    """Return the change of ``event``; None where it changes nothing. Raises what ``fold`` raises."""
    after = fold(job, event)
    return None if after is job else Change(job, event, after)


def fold(job: Job, event: ev.Event) -> Job:
    """Return the record after ``event``. Raises IllegalTransitionError for a transition that the state table lacks."""
    if job.state.is_terminal and not isinstance(event, ev.JobNoted):
        return job  # terminal is absorbing: a late fact of a dead rank changes nothing
    after = _fold(event, job)
    if after is job:
        return job
    after = without_ended(job, after)
    story = (
        *job.story[-STORY_LENGTH + 1 :],
        f"{event.at:.3f} {event.kind}" + (f" [{event.cause}]" if event.cause else ""),
    )
    return replace(after, version=job.version + 1, story=story)


@singledispatch
def _fold(event: ev.Event, job: Job) -> Job:
    raise CoreError(f"{type(event).__name__} cannot happen to job {job.id}, which exists")


def _enter(job: Job, phase: Phase, at: float, reason: Fact, **changes: Any) -> Job:
    """Return the record in ``phase``, with ``changes``. Raises IllegalTransitionError for a transition that the state table lacks."""
    if phase.state is not job.state:
        check_transition(job.state, phase.state, job.story)
        changes["state_since"] = at
    return replace(job, phase=phase, reason=reason, **changes)


def _last_changed(job: Job, **changes: Any) -> tuple[Attempt, ...]:
    return (*job.attempts[:-1], replace(job.attempts[-1], **changes))


def _current(job: Job, attempt: int) -> bool:
    return bool(job.attempts) and job.attempts[-1].number == attempt


def _holds_nothing(job: Job, event: ev.Event) -> None:
    if job.gang_open:
        raise BrokenRuleError(job.id, f"{event.kind} while its gang is not confirmed gone", job.story)
    if job.files_on:
        raise BrokenRuleError(job.id, f"{event.kind} while files of its gang are not collected", job.story)


@_fold.register
def _(event: ev.AttemptStarted, job: Job) -> Job:
    if event.attempt <= job.attempt_number:
        return job
    fresh, held = event.gang != job.gang, job.held
    if job.attempt_live or (fresh and (held is not None or job.files_on)):
        raise BrokenRuleError(job.id, "a second attempt while one is not confirmed gone", job.story)
    if fresh:
        gang = Gang(nodes=event.nodes)
    elif isinstance(held, Gang):
        gang = replace(held, nodes=event.nodes, pids=())
    else:
        raise BrokenRuleError(job.id, "an attempt in a gang that is gone", job.story)
    attempt = Attempt(
        number=event.attempt,
        gang=event.gang,
        state=AttemptState.STARTING,
        started_at=event.at,
        start_step=job.checkpoints.step,
        checkpoint_step=job.checkpoints.step,
        ranks=len(event.nodes),
    )
    past, attempts = shorten(job.past, (*_without_log(job.attempts), attempt))
    reason = reasons.PlacingGang() if fresh else reasons.StartingRanks(again=True)
    return _enter(job, Starting(gang=gang, failure=job.failure), event.at, reason, attempts=attempts, past=past)


def _without_log(attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    # The events keep the lines; the record, which is written with every event, must stay small.
    if not attempts or attempts[-1].failure is None:
        return attempts
    return (*attempts[:-1], replace(attempts[-1], failure=replace(attempts[-1].failure, log_tail=())))


@_fold.register
def _(event: ev.GangPlaced, job: Job) -> Job:
    phase = job.phase
    if not isinstance(phase, Holding) or event.gang != job.gang:
        return job
    if not isinstance(phase.gang, Gang) or phase.gang.seats == event.seats:
        return job
    reason = reasons.StartingRanks() if isinstance(phase, Starting) else job.reason
    return replace(job, phase=gang_changed(phase, seats=event.seats), reason=reason)


@_fold.register
def _(event: ev.AttemptRunning, job: Job) -> Job:
    if not _current(job, event.attempt) or not isinstance(job.phase, Starting):
        return job
    gang = job.phase.gang
    if gang is not None and gang.pids is not None:
        gang = replace(gang, pids=event.pids)
    phase = Running(gang=gang, exits=job.phase.exits, failure=job.phase.failure)
    reason = job.reason if job.gang_lost else reasons.RanksUp()
    attempts = _last_changed(job, state=AttemptState.RUNNING, running_at=event.at)
    limit_since = event.at if job.limit_since is None else job.limit_since
    return _enter(job, phase, event.at, reason, attempts=attempts, limit_since=limit_since)


@_fold.register
def _(event: ev.RankExited, job: Job) -> Job:
    phase = job.phase
    if not isinstance(phase, Holding) or phase.gang is None or not _current(job, event.attempt):
        return job
    if phase.exits.has(event.exit.rank):
        return job
    return replace(job, phase=replace(phase, exits=phase.exits.and_then(replace(event.exit, heard_at=event.at))))


@_fold.register
def _(event: ev.RanksAsked, job: Job) -> Job:
    phase = job.phase
    if not isinstance(phase, Running) or not _current(job, event.attempt):
        return job
    return replace(job, phase=leaving(phase, event.deadline), reason=event.reason)


@_fold.register
def _(event: ev.GangLost, job: Job) -> Job:
    phase = job.phase
    if not isinstance(phase, Holding) or phase.gang is None or event.gang != job.gang:
        return job
    known = isinstance(phase.gang, LostGang)
    if known and event.not_before <= job.fenced_until:
        return job  # nothing new; the loss of a second node would be
    fenced_until = max(job.fenced_until, event.not_before)
    later = event.reason.attempt or 0 if isinstance(event.reason, RecordRestored) else 0
    return replace(
        job,
        phase=losing(phase, phase.gang, fenced_until),
        fenced_until=fenced_until,
        reason=job.reason if known else event.reason,
        later_attempt=max(job.later_attempt, later),
    )


@_fold.register
def _(event: ev.LaterAttemptsFound, job: Job) -> Job:
    attempt, gang = max(job.next_attempt - 1, event.attempt), max(job.next_gang - 1, event.gang)
    if (attempt, gang) == (job.next_attempt - 1, job.next_gang - 1):
        return job
    job = replace(job, later_attempt=attempt, later_gang=gang)
    if not isinstance(job.phase, Holding) or job.phase.gang is None or job.gang_lost:
        return job
    phase = losing(job.phase, job.phase.gang, job.fenced_until)
    return replace(job, phase=phase, reason=RecordRestored(attempt=attempt))


@_fold.register
def _(event: ev.AttemptFailed, job: Job) -> Job:
    phase = job.phase
    if not _current(job, event.attempt) or not isinstance(phase, Starting | Running | Leaving):
        return job
    failure_class = event.failure.failure_class
    preempted = failure_class is FailureClass.PREEMPTION
    progressed = job.attempts[-1].progressed or job.checkpoints.step > job.attempts[-1].start_step
    restarts = dict(job.restarts)
    if event.retry:
        restarts[failure_class.value] = restarts.get(failure_class.value, 0) + 1
    state = _failed_attempt(job, failure_class)
    return _enter(
        job,
        recovering(phase, event, job.fenced_until),
        event.at,
        event.failure.reason,
        attempts=_last_changed(job, state=state, ended_at=event.failed_at, failure=event.failure),
        restarts=restarts,
        no_progress=(0 if progressed else job.no_progress) + int(event.retry and not preempted),
    )


def _failed_attempt(job: Job, failure_class: FailureClass) -> AttemptState:
    if failure_class is FailureClass.PREEMPTION:
        return AttemptState.PREEMPTED
    return AttemptState.LOST if failure_class is FailureClass.INFRA and job.gang_lost else AttemptState.FAILED


@_fold.register
def _(event: ev.AttemptSucceeded, job: Job) -> Job:
    phase = job.phase
    if not _current(job, event.attempt) or not isinstance(phase, Running | Leaving | Draining) or job.succeeded:
        return job
    if isinstance(phase, Draining) and isinstance(phase.stop.by, reasons.ByForce):
        return job  # its gang was given up: how it ended is not known
    gang = None if phase.gang is None else replace(phase.gang, pids=None)
    if isinstance(phase, Draining):
        after: Phase = replace(phase, gang=gang)
    else:
        after = Finishing(gang=gang, exits=phase.exits, failure=phase.failure)
    ended_at = event.at if job.attempts[-1].ended_at is None else job.attempts[-1].ended_at
    attempts = _last_changed(job, state=AttemptState.SUCCEEDED, ended_at=ended_at)
    return _enter(job, after, event.at, reasons.RanksSucceeded(releasing=True), attempts=attempts)


@_fold.register
def _(event: ev.AttemptGone, job: Job) -> Job:
    return _without_processes(job, event.at) if _current(job, event.attempt) else job


def _without_processes(job: Job, at: float) -> Job:
    phase = job.phase
    if not isinstance(phase, Holding) or phase.gang is None or phase.gang.pids is None:
        return job
    attempts = job.attempts
    if isinstance(phase, Draining) and attempts[-1].ended_at is None:
        attempts = _last_changed(job, ended_at=at, state=_drained_attempt(phase))
    return replace(job, attempts=attempts, phase=gang_changed(phase, pids=None))


def _drained_attempt(phase: Draining) -> AttemptState:
    return AttemptState.PREEMPTED if phase.stop.purpose is StopPurpose.PREEMPT else AttemptState.ABORTED


@_fold.register
def _(event: ev.GangReleased, job: Job) -> Job:
    if event.gang != job.gang or not job.gang_open:
        return job
    job = _without_processes(job, event.at)
    phase, reason, nodes = job.phase, job.reason, job.nodes
    if isinstance(phase, Restarting):
        phase = replacing(phase, None, phase.not_before)
    elif isinstance(phase, Holding):
        phase = replace(phase, gang=None)
    if event.files and isinstance(phase, Finishing | Replacing | GivingUp | Draining):  # no other gang is released
        phase = replace(phase, files_on=nodes)
        reason = reasons.CollectingFiles(cause=reasons.RanksSucceeded() if job.succeeded else reason)
    # A checkpoint that is not durable was in the memory of the actors that are gone.
    return replace(job, phase=phase, reason=reason, checkpoints=job.checkpoints.without_memory)


@_fold.register
def _(event: ev.FilesCollected, job: Job) -> Job:
    phase, reason = job.phase, job.reason
    if not isinstance(phase, Holding) or not phase.files_on or event.gang != job.gang:
        return job
    cause = reason.cause if isinstance(reason, reasons.CollectingFiles) else reason
    return replace(job, phase=replace(phase, files_on=()), reason=cause)


@_fold.register
def _(event: ev.GangAbandoned, job: Job) -> Job:
    if not job.gang_open or event.gang != job.gang:
        return job
    # The one way to an end without a gang that is confirmed gone. It forgets how the ranks ended: whatever they did, the job
    # is cancelled, and nothing of it starts again.
    last, stop = job.attempts[-1], Stop(purpose=StopPurpose.CANCEL, by=event.by, at=event.at, deadline=event.at)
    changes: dict[str, Any] = {"checkpoints": job.checkpoints.without_memory}
    if last.ended_at is None or last.state is AttemptState.SUCCEEDED:
        ended_at = event.at if last.ended_at is None else last.ended_at
        changes["attempts"] = _last_changed(job, state=AttemptState.ABORTED, ended_at=ended_at)
    reason = reasons.StopOrdered(purpose=stop.purpose, by=stop.by)
    return _enter(job, Draining(gang=None, failure=job.failure, stop=stop), event.at, reason, **changes)


@_fold.register
def _(event: ev.StopRequested, job: Job) -> Job:
    if job.succeeded or isinstance(job.phase, GivingUp):
        return job  # its end is decided; only its gang must be released
    reason = reasons.StopOrdered(purpose=event.purpose, by=event.by, at_once=event.deadline <= event.at)
    if isinstance(job.phase, Draining):
        before = job.phase.stop
        sooner = event.purpose is before.purpose and event.deadline < before.deadline
        if not sooner and not event.purpose.overrides(before.purpose):
            return job
        # The first stop informed its processes: their time to save runs from there.
        stop = Stop(purpose=event.purpose, by=event.by, at=before.at, deadline=min(before.deadline, event.deadline))
        return replace(job, phase=replace(job.phase, stop=stop), reason=reason)
    stop = Stop(purpose=event.purpose, by=event.by, at=event.at, deadline=event.deadline)
    draining = Draining(gang=job.held, files_on=job.files_on, exits=job.exits, failure=job.failure, stop=stop)
    attempts = job.attempts
    if job.attempt_live and attempts[-1].ended_at is None:
        attempts = _last_changed(job, state=AttemptState.DRAINING)
    elif attempts and attempts[-1].ended_at is None:  # its processes have ended, and its end is not yet classified
        attempts = _last_changed(job, state=_drained_attempt(draining), ended_at=event.at)
    return _enter(job, draining, event.at, reason, attempts=attempts)


@_fold.register
def _(event: ev.JobRequeued, job: Job) -> Job:
    if isinstance(job.phase, Pending):
        return job
    _holds_nothing(job, event)
    phase = Pending(not_before=max(event.not_before, job.fenced_until), failure=job.failure)
    return _enter(job, phase, event.at, event.reason)


@_fold.register
def _(event: ev.JobSuspended, job: Job) -> Job:
    if isinstance(job.phase, Suspended):
        return job
    _holds_nothing(job, event)
    return _enter(job, Suspended(failure=job.failure), event.at, reasons.Paused(by=event.by))


@_fold.register
def _(event: ev.JobResumed, job: Job) -> Job:
    if isinstance(job.phase, Pending):
        return job
    _holds_nothing(job, event)
    phase = Pending(not_before=job.fenced_until, failure=job.failure)
    return _enter(job, phase, event.at, reasons.Resumed(by=event.by))


@_fold.register
def _(event: ev.JobFinished, job: Job) -> Job:
    _holds_nothing(job, event)
    return _enter(job, _end(job, event), event.at, event.reason)


def _end(job: Job, event: ev.JobFinished) -> Ended:
    match event.state:
        case JobState.SUCCEEDED:
            return Succeeded()
        case JobState.CANCELLED:
            return Cancelled()
        case JobState.FAILED:
            return Failed(exit_code=event.exit_code, failure=_last_failure(job, event))
        case _:
            raise BrokenRuleError(job.id, f"finished as {event.state}, which is no end", job.story)


def _last_failure(job: Job, event: ev.JobFinished) -> ev.Failure | None:
    if job.stop is not None and job.stop.purpose is StopPurpose.TIMEOUT:
        return ev.Failure(failure_class=FailureClass.TIMEOUT, cause=event.reason)
    return job.failure


_fold.register(ev.CheckpointSaved, checkpoint_saved)
_fold.register(ev.ClockStepped, clock_stepped)
_fold.register(ev.FindingOpened, finding_opened)
_fold.register(ev.FindingClosed, finding_closed)


@_fold.register
def _(event: ev.FirstStep, job: Job) -> Job:
    if not _current(job, event.attempt) or job.attempts[-1].first_step_at is not None:
        return job
    changes = {"first_step_at": event.step_at, "first_step": event.step, "steps_lost": event.steps_lost}
    return replace(job, attempts=_last_changed(job, **changes))


@_fold.register
def _(event: ev.JobUpdated, job: Job) -> Job:
    if event.priority == job.priority:
        return job
    return replace(job, priority=event.priority)


@_fold.register
def _(event: ev.JobNoted, job: Job) -> Job:
    degraded = job.degraded if event.degraded is None or not job.gang_open else event.degraded
    if degraded == job.degraded and job.notes[-1:] == (event.note,):
        return job
    phase = job.phase
    if isinstance(phase, Holding) and degraded != job.degraded:
        phase = gang_changed(phase, degraded=degraded)
    return replace(job, phase=phase, notes=(*job.notes[-9:], event.note))
