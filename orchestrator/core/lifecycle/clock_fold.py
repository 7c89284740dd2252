"""Folds a step of the daemon's clock into a job's record: what is measured until now, or is due, moves with the clock.

What has ended keeps the times of its own clock: recordings and logs of that time have them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from orchestrator.core.job.attempt import Exits
from orchestrator.core.job.phases import Draining, Holding, Leaving, Pending, Replacing, Restarting

if TYPE_CHECKING:
    from orchestrator.core.events import ClockStepped
    from orchestrator.core.job.attempt import Attempt
    from orchestrator.core.job.checkpoints import Checkpoints
    from orchestrator.core.job.phases import Phase
    from orchestrator.core.job.record import Job


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
