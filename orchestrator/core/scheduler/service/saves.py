"""Times at which running jobs save: what a stop costs now, and whether to wait for the next checkpoint. Pure.

The interval between the newest two checkpoints on storage is expected to pass again until the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from orchestrator.core.scheduler.placement import rank_size

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

IMMINENT_SECONDS: Final = 60.0
"""A stop waits for no checkpoint that is due later than this."""
LATE_SHARE: Final = 0.1
"""A stop waits for a late checkpoint for this part of the interval, and for ``LATE_SECONDS`` at most."""
LATE_SECONDS: Final = 10.0


class Saves(Protocol):
    """Times at which a running job has saved, and is expected to."""

    def saved_at(self, job: Job, now: float) -> float | None:
        """Return when its newest checkpoint on storage was saved; None without one."""

    def next_at(self, job: Job, now: float) -> float | None:
        """Return by when its next one is expected; None where that is not known."""


class RecordedSaves:
    """Times of checkpoints from the jobs' records."""

    def saved_at(self, job: Job, now: float) -> float | None:  # noqa: ARG002 - the protocol's
        """Return when the newest on storage was saved."""
        return job.checkpoints.durable_at

    def next_at(self, job: Job, now: float) -> float | None:  # noqa: ARG002 - the protocol's
        """Return by when the present attempt is expected to save the next one; None if that is not known."""
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
    """Return when the job will have saved, if a stop must wait for that; else None.

    It must if the checkpoint is due within ``IMMINENT_SECONDS``, and sooner than the job has been without one.
    """
    at = saves.next_at(job, now)
    if at is None or not now < at <= now + IMMINENT_SECONDS or at - now >= unsaved_seconds(job, now, saves):
        return None
    return at
