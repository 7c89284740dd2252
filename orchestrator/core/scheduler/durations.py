"""The time that jobs are expected to need still, how that is known, and its level. Pure.

``max_duration`` is a limit that the daemon enforces. The run times of earlier jobs of the same user and name are a
forecast. A job of which nothing is known is expected to run for as long again as it has run, which is true on average
of durations with a long tail.

A *level* stands for twice the time of the level before it. A waiting job's level decides its place among its equals. A
job of which nothing is known is expected to need ``UNKNOWN_SECONDS`` at least, so a ``max_duration`` never puts a job
behind one without. Only service that a preemption ended counts: a failure does not move a job back.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, floor, log2
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.job.record import running_seconds
from orchestrator.core.states import AttemptState, JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

REMEMBERED: Final = 20
"""Maximum number of run times kept for the jobs of one user and name."""
MAX_LIKES: Final = 10_000
ENOUGH: Final = 3
"""Minimum number of run times for a forecast."""
LEVEL_SECONDS: Final = 60.0
"""Seconds that the lowest level stands for."""
CLAIMS_AFTER: Final = 10.0
"""A job that has waited for this multiple of ``ageing`` claims what is free, and running jobs stop for it whatever their level."""
UNKNOWN_SECONDS: Final = 600.0
"""Minimum seconds that a job of which nothing is known is expected to need."""


class Basis(StrEnum):
    """Source of an expected duration."""

    LIMIT = "max_duration"
    PROGRESS = "its progress"
    HISTORY = "like jobs"
    ELAPSED = "time so far"


class Like(NamedTuple):
    """The user and the name that like jobs share: jobs that are expected to run for similar times."""

    user: str
    name: str


class TimeLeft(NamedTuple):
    """Seconds for which a job is expected to run from now on, their source, and the number of jobs in that source."""

    seconds: float
    basis: Basis
    jobs: int = 0


class Clock(NamedTuple):
    """Data from which the time that a job may still run is computed; they change only with the job's record.

    ``ran`` is the seconds of the attempts that have ended, ``since`` is when all ranks of the current attempt were up,
    and ``limit`` is the ``max_duration``, which counts from ``limit_since`` on. ``over_at`` is when a job that was
    stopped for good releases its gang; 0 if its ranks have ended.
    """

    like: Like
    ran: float
    since: float | None
    limit: float | None
    limit_since: float | None
    over_at: float | None

    def ran_until(self, now: float) -> float:
        """Return for how many seconds the attempts have run by ``now``."""
        return self.ran if self.since is None else self.ran + max(0.0, now - self.since)

    def limit_left(self, now: float) -> float | None:
        """Return the seconds after which ``max_duration`` ends the job; None without one."""
        if self.limit is None:
            return None
        since = now if self.limit_since is None else self.limit_since
        return max(0.0, since + self.limit - now)


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The newest run times of jobs that succeeded, in seconds, the oldest first.

    ``reported`` is the time that running jobs report to need still.
    """

    known: Mapping[Like, Sequence[float]] = field(default_factory=dict)
    reported: Mapping[JobId, float] = field(default_factory=dict)

    def left(self, job: Job, now: float) -> TimeLeft | None:
        """Return the time that the job still runs, from its start on if it waits; None if nothing is known of it."""
        return self.left_by(clock_of(job), job.id, now)

    def left_by(self, clock: Clock, job_id: JobId, now: float) -> TimeLeft | None:
        """Return the time that the job of a clock still runs; None if nothing is known of it."""
        ran = clock.ran_until(now)
        limit = clock.limit_left(now)
        reported = self.reported.get(job_id)
        found = self.of_like(clock.like, ran) if reported is None else TimeLeft(reported, Basis.PROGRESS)
        if found is None and ran > 0:
            found = TimeLeft(ran, Basis.ELAPSED)
        if limit is not None and (found is None or limit < found.seconds):
            return TimeLeft(limit, Basis.LIMIT)
        return found

    def error(self, job: Job) -> float | None:
        """Return the median error of the forecasts for like jobs that have ended, as a fraction of their run times.

        The forecast for each is the median of the run times before it. None where too few are known.
        """
        times = self.known.get(like(job), ())
        wrong = [abs(median(times[:n]) - took) / max(took, 1.0) for n, took in enumerate(times) if n >= ENOUGH]
        return median(wrong) if wrong else None

    def of_like(self, who: Like, ran: float) -> TimeLeft | None:
        """Return the median time left to the like jobs that ran for longer than ``ran``; None if too few are known."""
        known = self.known.get(who, ())
        if len(known) < ENOUGH:
            return None
        times = sorted(known)
        longer = times[bisect_right(times, ran) :]
        return TimeLeft(median(longer) - ran, Basis.HISTORY, len(times)) if longer else None

    def likes(self) -> AbstractSet[Like]:
        """Return the keys with enough run times for a forecast."""
        return {who for who, times in self.known.items() if len(times) >= ENOUGH}

    def level(self, who: Like, ran: float, limit: float | None) -> int:
        """Return the level of a job that has run for ``ran`` seconds; ``limit`` is what its ``max_duration`` leaves of it."""
        found = self.of_like(who, ran) if self.known else None
        seconds = max(UNKNOWN_SECONDS, ran) if found is None else found.seconds
        seconds = seconds if limit is None else min(seconds, max(0.0, limit))
        return 0 if seconds <= LEVEL_SECONDS else ceil(log2(seconds / LEVEL_SECONDS))


class RunTimeHistory:
    """Learns run times from the records of jobs that end. ``view`` also shows what is learned later."""

    def __init__(self) -> None:
        self._known: dict[Like, tuple[float, ...]] = {}
        self.view = RunTimes(self._known)

    def ended(self, job: Job) -> None:
        """Record the run time of a job that has just ended."""
        if (seconds := _run_time(job)) is not None:
            times = self._known.pop(like(job), ())  # inserted again below, to be forgotten last
            self._known[like(job)] = (*times, seconds)[-REMEMBERED:]
            if len(self._known) > MAX_LIKES:
                del self._known[next(iter(self._known))]

    def remember(self, jobs: Iterable[Job]) -> None:
        """Record the run times of jobs that ended before those that are known."""
        for job in sorted(jobs, key=lambda job: job.ended_at or 0.0, reverse=True):
            times = self._known.get(like(job), ())
            room = len(times) < REMEMBERED and (times or len(self._known) < MAX_LIKES)
            if room and (seconds := _run_time(job)) is not None:
                self._known[like(job)] = (seconds, *times)


def like(job: Job) -> Like:
    """Return the key that the job shares with like jobs."""
    return Like(job.submission.user, job.name)


def clock_of(job: Job) -> Clock:
    """Return the data from which the time that the job may still run is computed."""
    ended, last = job.attempts, None
    if ended and ended[-1].ended_at is None:
        ended, last = ended[:-1], ended[-1]
    limit, stop = job.spec.max_duration, job.stop
    over_at = None if stop is None or stop.purpose.returns else stop.deadline
    return Clock(
        like=like(job),
        ran=job.past.ran_seconds + sum(running_seconds(attempt, attempt.ended_at) for attempt in ended),
        since=None if last is None else last.running_at,
        limit=None if limit is None else limit.total_seconds(),
        limit_since=job.limit_since,
        over_at=0.0 if job.succeeded and over_at is None else over_at,
    )


def ran_seconds(job: Job, now: float) -> float:
    """Return for how many seconds the job's attempts have run by ``now``."""
    return clock_of(job).ran_until(now)


def limit_left(job: Job, now: float) -> float | None:
    """Return the seconds until ``max_duration`` ends the job, or None; it counts from when all ranks were first up."""
    return None if job.spec.max_duration is None else clock_of(job).limit_left(now)


def was_preempted(job: Job) -> bool:
    """Whether a preemption ended the last attempt of a waiting job."""
    return bool(job.attempts) and job.attempts[-1].state is AttemptState.PREEMPTED


def waiting_since(job: Job) -> float:
    """Return since when a waiting job waits: its submission, or the preemption of its last attempt."""
    ended = job.attempts[-1].ended_at if was_preempted(job) else None
    return job.submission.submitted_at if ended is None else ended


def claims_at(job: Job, ageing: float) -> float:
    """Return from when on a waiting job claims what is free in any case."""
    return waiting_since(job) + CLAIMS_AFTER * ageing


def attained(job: Job) -> float:
    """Return the class of a waiting job's run time; 0 before its first attempt, and if a failure ended the last one."""
    return class_of(ran_seconds(job, 0.0)) if was_preempted(job) else 0.0


def class_of(ran: float) -> float:
    """Return the largest power of two times ``LEVEL_SECONDS`` that is no longer than a run time: jobs fall into few classes."""
    return LEVEL_SECONDS * 2.0 ** max(-1, floor(log2(max(1.0, ran) / LEVEL_SECONDS)))


def running_level(clock: Clock, now: float, run_times: RunTimes) -> int:
    """Return the level of a running job: the one that it would wait on if it stopped."""
    ran = class_of(clock.ran_until(now))
    return run_times.level(clock.like, ran, None if clock.limit is None else clock.limit - ran)


def _run_time(job: Job) -> float | None:
    """Return the run time in a job's record; None if the job did not succeed, or never ran."""
    seconds = ran_seconds(job, job.ended_at or 0.0)
    return seconds if job.state is JobState.SUCCEEDED and seconds > 0 else None
