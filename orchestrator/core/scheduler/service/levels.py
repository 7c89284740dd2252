"""Levels of the time that a job is still expected to need; each stands for twice as much as the one before it. Pure.

The time that a job needs is forecast from like jobs (durations.py), and bounded by its ``max_duration``. Without like
jobs, attained service decides: a job is expected to need as much again as it has run, and at least ``UNKNOWN_SECONDS``.
With durations of a long tail that is what is left on average; this is least attained service, in levels as in Tiresias.
So a ``max_duration`` never puts a job behind one without. Only service that a preemption ended counts: a failure does
not move a job back.
"""

from __future__ import annotations

from math import ceil, floor, log2
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.scheduler.durations import Like, ran_seconds
from orchestrator.core.states import AttemptState

if TYPE_CHECKING:
    from collections.abc import Container

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes
    from orchestrator.core.scheduler.queues import Sharing

LEVEL_SECONDS: Final = 60.0
"""Seconds that the lowest level stands for."""
UNKNOWN_SECONDS: Final = 600.0
"""Minimum seconds that a job of which nothing is known is expected to need."""
CLAIMS_AFTER: Final = 3.0
SHARED_CLAIMS_AFTER: Final = 10.0
"""A job that has waited for this multiple of ``ageing`` claims what is free; the second applies with time sharing."""
AGED: Final = -1
"""The level of a job that has waited for too long: before all others."""


class Work(NamedTuple):
    """Properties that decide a waiting job's level: its name, if like jobs give a forecast, its run time and limit.

    Jobs that have run fall into few classes: ``ran`` is a power of two times ``LEVEL_SECONDS``, and 0 for those that
    have not.
    """

    name: str
    ran: float
    limit: float | None


def work_of(job: Job, known: Container[Like]) -> Work:
    """Return the properties that decide a waiting job's level; ``known`` are the keys with enough like jobs."""
    limit = job.spec.max_duration
    name = job.name if known and Like(job.submission.user, job.name) in known else ""
    return Work(name, attained(job) if job.attempts else 0.0, None if limit is None else limit.total_seconds())


def attained(job: Job) -> float:
    """Return the class of a waiting job's run time; 0 before its first attempt, and if a failure ended the last one."""
    if not was_preempted(job):
        return 0.0
    return LEVEL_SECONDS * 2.0 ** max(-1, floor(log2(max(1.0, ran_seconds(job, 0.0)) / LEVEL_SECONDS)))


def was_preempted(job: Job) -> bool:
    """Whether a preemption ended the last attempt of a waiting job."""
    return bool(job.attempts) and job.attempts[-1].state is AttemptState.PREEMPTED


def waiting_since(job: Job) -> float:
    """Return since when a waiting job waits: its submission, or the preemption of its last attempt."""
    ended = job.attempts[-1].ended_at if was_preempted(job) else None
    return job.submission.submitted_at if ended is None else ended


def has_aged(job: Job, sharing: Sharing, now: float) -> bool:
    """Return whether a waiting job has waited for ``ageing``."""
    return waiting_since(job) <= now - sharing.ageing


def claims_all(job: Job, sharing: Sharing, now: float) -> bool:
    """Return whether a waiting job has waited for so long that it claims what is free from all others."""
    return claims_all_at(job, sharing) <= now


def claims_all_at(job: Job, sharing: Sharing) -> float:
    """Return when a waiting job has waited for so long that it claims what is free from all others.

    That is after three times ``ageing``, and after ten times with time sharing: others then stop for the job much
    sooner, unless it needs very many of them.
    """
    return waiting_since(job) + (CLAIMS_AFTER if sharing.time_sharing is None else SHARED_CLAIMS_AFTER) * sharing.ageing


def level_of(work: Work, user: str, run_times: RunTimes) -> int:
    """Return the level of a user's waiting jobs with this work."""
    left = None if work.limit is None else max(0.0, work.limit - work.ran)
    return level(expected_seconds(Like(user, work.name), work.ran, left, run_times))


def running_level(job: Job, now: float, run_times: RunTimes) -> int:
    """Return the level of a running job."""
    ran = ran_seconds(job, now)
    limit = job.spec.max_duration
    left = None if limit is None else max(0.0, limit.total_seconds() - ran)
    return level(expected_seconds(Like(job.submission.user, job.name), ran, left, run_times))


def expected_seconds(who: Like, ran: float, limit: float | None, run_times: RunTimes) -> float:
    """Return the seconds that a job still needs after ``ran``; ``limit`` is what its ``max_duration`` leaves of it."""
    like = run_times.of_like(who, ran) if who.name else None
    seconds = max(UNKNOWN_SECONDS, ran) if like is None else like.seconds
    return seconds if limit is None else min(seconds, limit)


def level(seconds: float) -> int:
    """Return the level of an expected time."""
    return 0 if seconds <= LEVEL_SECONDS else ceil(log2(seconds / LEVEL_SECONDS))
