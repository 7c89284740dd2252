"""What a saved checkpoint changes in a job's record: where the next attempt begins, and whether this one has made progress."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.core.events import CheckpointSaved
    from orchestrator.core.job import Job


def checkpoint_saved(event: CheckpointSaved, job: Job) -> Job:
    """The record after ``event``; ``job`` itself where it changes nothing."""
    return _script_saved(event, job) if event.digest else _context_saved(event, job)


def _context_saved(event: CheckpointSaved, job: Job) -> Job:
    """A checkpoint of orch's own format. Its step tells whether it is newer."""
    if event.attempt != job.attempt_number:
        return job  # fenced: only the current attempt's checkpoints count
    if not event.path and not job.gang_open:
        return job  # it went with the actors that had it in memory
    newest = job.checkpoint_at is None or event.step > job.checkpoint_step
    durable = bool(event.path) and (job.durable_at is None or event.step > job.durable_step)
    if newest:
        if job.attempts:
            progressed = job.attempts[-1].progressed or event.step > job.attempts[-1].start_step
            job = _with_attempt(job, checkpoint_step=event.step, progressed=progressed)
            job = replace(job, no_progress=0 if progressed else job.no_progress)
        job = replace(job, checkpoint_step=event.step, checkpoint_at=event.at)
    if durable:
        job = replace(job, checkpoint_path=event.path, durable_step=event.step, durable_at=event.at)
    return job


def _script_saved(event: CheckpointSaved, job: Job) -> Job:
    """A file of the script's own: newer by its content and time, whatever number its name has.

    One that an attempt has left may be found as late as when the next one is about to start: it is what that one begins with.
    """
    if not job.attempts or not job.attempt_number - 1 <= event.attempt <= job.attempt_number:
        return job
    if event.digest == job.checkpoint_digest or (job.durable_at is not None and event.at <= job.durable_at):
        return job
    if event.attempt == job.attempt_number:
        job = _with_attempt(job, checkpoint_step=event.step, progressed=True)
    else:
        job = _with_attempt(job, checkpoint_step=event.step, start_step=event.step)
    return replace(
        job,
        no_progress=0,
        checkpoint_step=event.step,
        checkpoint_at=event.at,
        checkpoint_path=event.path,
        checkpoint_digest=event.digest,
        durable_step=event.step,
        durable_at=event.at,
    )


def _with_attempt(job: Job, **changes: Any) -> Job:
    return replace(job, attempts=(*job.attempts[:-1], replace(job.attempts[-1], **changes)))
