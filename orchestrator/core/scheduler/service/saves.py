"""When running jobs save: what a stop costs now, and whether it is worth to wait for the next checkpoint. Pure.

The next checkpoint is expected as long after the newest one on storage as that came after the one before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from orchestrator.core.scheduler.placement import rank_size

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

IMMINENT_SECONDS: Final = 60.0
"""A stop waits for no checkpoint that is further away."""
LATE_SHARE: Final = 0.1
"""A checkpoint may be late by this part of the interval, and by ``LATE_SECONDS`` at most, before it is waited for no more."""
LATE_SECONDS: Final = 10.0


class Saves(Protocol):
    """When a running job has saved, and is expected to."""

    def saved_at(self, job: Job, now: float) -> float | None:
        """Return when its newest checkpoint on storage was saved; None without one."""

    def next_at(self, job: Job, now: float) -> float | None:
        """Return by when its next one is expected; None where that is not known."""


class RecordedSaves:
    """Checkpoints as the records have them."""

    def saved_at(self, job: Job, now: float) -> float | None:  # noqa: ARG002 - the protocol's
        """Return when the newest on storage was saved."""
        return job.checkpoints.durable_at

    def next_at(self, job: Job, now: float) -> float | None:  # noqa: ARG002 - the protocol's
        """Return by when the next one is expected of the present attempt."""
        at, every = job.checkpoints.durable_at, job.checkpoints.durable_every
        attempt = job.attempt
        if at is None or every is None or attempt is None or attempt.running_at is None or at < attempt.running_at:
            return None
        return at + every + min(LATE_SECONDS, LATE_SHARE * every)


RECORDED: Final = RecordedSaves()


def unsaved_seconds(job: Job, now: float, saves: Saves = RECORDED) -> float:
    """Return the seconds that a job repeats at most if it stops now."""
    attempt = job.attempt
    began = attempt.running_at if attempt is not None and attempt.running_at is not None else now
    return max(0.0, now - max(began, saves.saved_at(job, now) or 0.0))


def loss(job: Job, now: float, saves: Saves = RECORDED) -> tuple[float, float, int]:
    """Return what a stop costs at most: GPU seconds and CPU seconds since the newest checkpoint on storage; then the job's age."""
    seconds = unsaved_seconds(job, now, saves)
    cpus, gpus, _ = rank_size(job)
    return job.num_workers * gpus * seconds, job.num_workers * cpus * seconds, -job.submission.sequence


def restart_seconds(job: Job) -> float:
    """Return the seconds that a job's last start took: to its first step, or until its ranks were up where no step is known."""
    attempt = job.attempt
    if attempt is None:
        return 0.0
    up = attempt.running_at if attempt.first_step_at is None else attempt.first_step_at
    return 0.0 if up is None else max(0.0, up - attempt.started_at)


def move_loss(job: Job, now: float, saves: Saves = RECORDED) -> tuple[float, float, int]:
    """Return what a move to other nodes costs at most: as ``loss``, and with the time of a start."""
    seconds = unsaved_seconds(job, now, saves) + restart_seconds(job)
    cpus, gpus, _ = rank_size(job)
    return job.num_workers * gpus * seconds, job.num_workers * cpus * seconds, -job.submission.sequence


def worth_waiting(job: Job, now: float, saves: Saves = RECORDED) -> float | None:
    """Return when the job will have saved, where a stop shall wait for that: soon, and sooner than it has gone without."""
    at = saves.next_at(job, now)
    if at is None or not now < at <= now + IMMINENT_SECONDS or at - now >= unsaved_seconds(job, now, saves):
        return None
    return at
