"""``decide(state, now) -> commands``: the whole policy of the daemon as one pure function.

Commands are events to be written, and effects to be carried out once the events are. Effects are derived from the
record alone, so a restarted daemon that has read the store orders exactly what was under way. The first scheduler is
priority, then order of arrival; a gang that does not fit claims what is free, so nothing behind it can starve it. What
no job needs goes to elastic jobs (core/scheduler/elastic.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.effects import Effect, desired_effect
from orchestrator.core.facts.gangs import MaxDuration, StartupTimeout
from orchestrator.core.facts.rank_ends import NoExitStatus
from orchestrator.core.facts.reasons import (
    BackingOff,
    Cancelled,
    DoesNotFit,
    MadeRoom,
    NoRoom,
    NotEnoughFree,
    PlacedAnew,
    RanksSucceeded,
)
from orchestrator.core.failure import classify, decide_retry, gang_failure, stop_failure
from orchestrator.core.phases import (
    Draining,
    Finishing,
    GivingUp,
    Replacing,
    Restarting,
    Running,
    Starting,
)
from orchestrator.core.scheduler import elastic
from orchestrator.core.scheduler.placement import claim, could_ever_fit, free_on, rank_size
from orchestrator.core.states import FailureClass, JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Free, Node
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.core.phases import Recovering


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a decision looks at: every live (not terminal) job, and the nodes."""

    jobs: Mapping[JobId, Job]
    nodes: Mapping[str, Node]


@dataclass(slots=True, kw_only=True)
class Commands:
    """Events to write, effects that the records want, when to ask again, and why jobs wait."""

    events: list[ev.Event] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    wake_at: float | None = None
    waiting: dict[JobId, Fact] = field(default_factory=dict)

    def ask_again(self, at: float | None) -> None:
        """Ask again no later than ``at``."""
        if at is not None and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at


def decide(state: State, now: float) -> Commands:
    """What follows from ``state`` at wall time ``now``. After its events are folded, ask again until there are none."""
    commands = Commands()
    for job in state.jobs.values():
        if job.state.may_hold_gang:
            _advance(job, now, commands)
    _schedule(state, now, commands)
    return commands


def queue_order(job: Job) -> tuple[int, int]:
    """Higher priority first, then order of arrival. Back-off never changes it."""
    return (-job.priority, job.sequence)


def request_stop(job: Job, purpose: StopPurpose, by: str, now: float) -> list[ev.Event]:
    """The events of a person's cancel or pause, or of the scheduler's own stop.

    Empty when it is asked for already, or when the job's end is decided and only its gang has to go.
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


def declare_hung(job: Job, failure: ev.Failure, failed_at: float, now: float) -> list[ev.Event]:
    """The events that end an attempt which hangs since ``failed_at``; empty when it has ended, or is ending, by itself.

    Ranks that wait for one that has left hang because of what made it leave.
    """
    if job.state is not JobState.RUNNING or job.succeeded or job.gang_lost or any(not e.ok for e in job.exits):
        return []
    commands = Commands()
    left = job.left_early
    _fail(job, stop_failure(left) if left else failure, failed_at, now, commands)
    return commands.events


def _advance(job: Job, now: float, commands: Commands) -> None:
    before = len(commands.events)
    match job.phase:
        case Starting() | Running():
            _advance_live(job, now, commands)
        case Finishing(gang=gang):
            commands.events += [_finished(job, now)] if gang is None else []
        case Restarting() | Replacing() | GivingUp() as phase:
            _advance_recovering(job, phase, now, commands)
        case Draining() as phase:
            _advance_draining(job, phase, now, commands)
        case _:
            pass
    effect = desired_effect(job)
    if effect is not None and len(commands.events) == before:
        commands.effects.append(effect)


def _advance_live(job: Job, now: float, commands: Commands) -> None:
    if job.ended_well:
        commands.events.append(_all_ended_well(job, now))
        return
    verdict = classify(job, now)
    if isinstance(verdict, float):
        commands.ask_again(verdict)
    elif verdict is not None:
        _fail(job, verdict.failure, verdict.failed_at, now, commands)
        return
    elif job.gang_lost:
        _fail(job, gang_failure(job.reason), now, now, commands)
        return
    elif not job.gang_open or not job.attempt_live:
        _fail(job, gang_failure(NoExitStatus()), now, now, commands)
        return
    _check_deadlines(job, now, commands)


def _all_ended_well(job: Job, now: float) -> ev.Event:
    if job.state is JobState.STARTING:  # they ended before it was known that all of them were up
        return ev.AttemptRunning(job_id=job.id, at=now, attempt=job.attempt_number, pids=())
    return ev.AttemptSucceeded(job_id=job.id, at=now, attempt=job.attempt_number)


def _check_deadlines(job: Job, now: float, commands: Commands) -> None:
    attempt = job.attempts[-1]
    if job.state is JobState.STARTING:
        limit = attempt.started_at + job.spec.health.startup_timeout.total_seconds()
        if now >= limit:
            cause = StartupTimeout(limit_seconds=job.spec.health.startup_timeout.total_seconds())
            failure = ev.Failure(failure_class=FailureClass.INFRA, cause=cause)
            _fail(job, failure, now, now, commands)
            return
        commands.ask_again(limit)
    if job.spec.max_duration is not None and job.started_at is not None:
        limit = job.started_at + job.spec.max_duration.total_seconds()
        if now >= limit:
            commands.events.extend(request_stop(job, StopPurpose.TIMEOUT, "max_duration", now))
            return
        commands.ask_again(limit)


def _fail(job: Job, failure: ev.Failure, failed_at: float, now: float, commands: Commands) -> None:
    retry = decide_retry(job, failure, now)
    commands.events.append(
        ev.AttemptFailed(
            job_id=job.id,
            at=now,
            attempt=job.attempt_number,
            failure=replace(failure, refusal=retry.refusal),
            failed_at=failed_at,
            retry=retry.retry,
            keep_gang=retry.keep_gang,
            not_before=retry.not_before,
        )
    )


def _advance_recovering(job: Job, phase: Recovering, now: float, commands: Commands) -> None:
    if isinstance(phase, Restarting):
        _restart(job, phase, now, commands)
    elif phase.gang is not None or elastic.returns(job, now):
        return
    elif isinstance(phase, GivingUp):
        commands.events.append(_finished(job, now))
    else:
        reason = PlacedAnew(cause=phase.failure.reason)
        commands.events.append(ev.JobRequeued(job_id=job.id, at=now, reason=reason, not_before=phase.not_before))


def _restart(job: Job, phase: Restarting, now: float, commands: Commands) -> None:
    """The next attempt in the same gang, when the processes of the last one are gone and its time has come."""
    if phase.gang.pids is not None:
        return
    if now < phase.not_before:
        commands.ask_again(phase.not_before)
        return
    number, nodes = job.attempt_number + 1, phase.gang.nodes
    commands.events.append(ev.AttemptStarted(job_id=job.id, at=now, attempt=number, gang=job.gang, nodes=nodes))


def _advance_draining(job: Job, phase: Draining, now: float, commands: Commands) -> None:
    if phase.gang is not None:
        return
    if job.succeeded or _ended_by_itself(job):
        commands.events.append(_finished(job, now))
        return
    if elastic.returns(job, now):
        return
    by = phase.stop.by
    match phase.stop.purpose:
        case StopPurpose.CANCEL:
            event: ev.Event = ev.JobFinished(job_id=job.id, at=now, state=JobState.CANCELLED, reason=Cancelled(by=by))
        case StopPurpose.PAUSE:
            event = ev.JobSuspended(job_id=job.id, at=now, by=by)
        case StopPurpose.TIMEOUT:
            limit = job.spec.max_duration
            reason = MaxDuration(limit_seconds=limit.total_seconds() if limit else 0.0)
            event = ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=reason)
        case StopPurpose.PREEMPT | StopPurpose.RESIZE:
            event = ev.JobRequeued(job_id=job.id, at=now, reason=MadeRoom(by=by), not_before=job.fenced_until)
    commands.events.append(event)


def _ended_by_itself(job: Job) -> bool:
    """Every rank had ended well before a stop was requested."""
    stop_at = job.stop.at if job.stop else 0.0
    return job.ended_well and all(e.at <= stop_at for e in job.exits)


def _finished(job: Job, now: float) -> ev.JobFinished:
    if job.succeeded or _ended_by_itself(job):
        return ev.JobFinished(job_id=job.id, at=now, state=JobState.SUCCEEDED, reason=RanksSucceeded(), exit_code=0)
    failure = job.failure
    code = failure.exit_code if failure else None
    if failure is not None and code is None and failure.signal is not None:
        code = 128 + failure.signal
    reason = failure.reason if failure else job.reason
    return ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=reason, exit_code=code or 1)


def _schedule(state: State, now: float, commands: Commands) -> None:
    queue = sorted((j for j in state.jobs.values() if _wants_gang(j, now)), key=_scheduling_order)
    free = free_on(state.nodes.values(), state.jobs.values())
    placed: list[tuple[Job, tuple[str, ...]]] = []
    for job in queue:
        nodes = _try(job, state, free, now, commands)
        if nodes is not None:
            elastic.take(job, nodes, free)
            placed.append((job, nodes))
        elif job.state is not JobState.PENDING:
            reason = NoRoom(ranks=job.least_workers, cause=job.reason)
            commands.events.append(ev.JobRequeued(job_id=job.id, at=now, reason=reason))
    for job, nodes in placed:
        larger = elastic.extend(job, nodes, free, state.nodes)
        commands.events.append(
            ev.AttemptStarted(job_id=job.id, at=now, attempt=job.attempt_number + 1, gang=job.gang + 1, nodes=larger)
        )
    _grow(state, free, now, commands)


def _wants_gang(job: Job, now: float) -> bool:
    if job.state is JobState.DRAINING and _ended_by_itself(job):
        return False
    return job.state is JobState.PENDING or elastic.returns(job, now)


def _scheduling_order(job: Job) -> tuple[bool, tuple[int, int]]:
    """A job that was stopped only to be resized is asked before all others: it is not to lose what it had."""
    return (not elastic.is_resizing(job), queue_order(job))


def _try(job: Job, state: State, free: Mapping[str, Free], now: float, commands: Commands) -> tuple[str, ...] | None:
    """Where the job goes; None, with the reason noted and what it waits for claimed, when it has to wait."""
    if not state.nodes:
        return None
    if job.not_before > now:
        commands.ask_again(job.not_before)
        commands.waiting[job.id] = BackingOff(seconds=job.not_before - now, cause=job.reason)
        return None
    nodes = elastic.first_place(job, free, state.nodes)
    if nodes is None and not could_ever_fit(job, state.nodes):
        # It claims nothing: what will never be enough for it would be kept from all jobs behind it.
        gpus, cpus = _demand(job)
        commands.waiting[job.id] = DoesNotFit(gpus=gpus, cpus=cpus)
    elif nodes is None:
        commands.waiting[job.id] = _why_waiting(job, free.values())
        claim(job, free, state.nodes)
    return nodes


def _grow(state: State, free: Mapping[str, Free], now: float, commands: Commands) -> None:
    """Stop elastic jobs that can have more ranks than they do, where this is a good moment for them."""
    busy = {event.job_id for event in commands.events}
    due = [j for j in state.jobs.values() if j.id not in busy and elastic.growth_due(j, now)]
    if not due:
        return
    for job in state.jobs.values():  # those in their back-off delay no job, but no job grows into what they need
        backs_off = job.state is JobState.PENDING and job.not_before > now
        if backs_off and could_ever_fit(job, state.nodes):
            claim(job, free, state.nodes)
    for job in sorted(due, key=queue_order):
        at = elastic.growth_due(job, now)
        if at is not True:
            commands.ask_again(float(at))
            continue
        size = elastic.grown_size(job, free, state.nodes)
        if size > job.num_workers:
            by = f"the scheduler, to run on {size} ranks instead of {job.num_workers}"
            commands.events.extend(request_stop(job, StopPurpose.RESIZE, by, now))


def _why_waiting(job: Job, free: Iterable[Free]) -> NotEnoughFree:
    left = list(free)
    gpus, cpus = _demand(job)
    return NotEnoughFree(
        gpus=gpus,
        cpus=cpus,
        free_gpus=sum(max(0.0, f.gpus) for f in left),
        free_cpus=sum(max(0.0, f.cpus) for f in left),
    )


def _demand(job: Job) -> tuple[float, float]:
    """GPUs and CPUs of the fewest ranks that it may have."""
    cpus, gpus, _ = rank_size(job)
    return gpus * job.least_workers, cpus * job.least_workers


__all__ = ["Commands", "State", "decide", "declare_hung", "queue_order", "request_stop"]
