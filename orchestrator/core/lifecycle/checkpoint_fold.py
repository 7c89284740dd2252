"""Folds a saved checkpoint into a job's record: where the next attempt begins, and whether this one has made progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.core.job.checkpoints import Checkpoints, Durable, Saved

if TYPE_CHECKING:
    from orchestrator.core.events import CheckpointSaved
    from orchestrator.core.job.attempt import Attempt
    from orchestrator.core.job.record import Job


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
