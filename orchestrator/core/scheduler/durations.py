"""Expected remaining run times of jobs, and the sources from which they are known. Pure.

``max_duration`` is a limit that the daemon enforces. The run times of earlier jobs of the same user and name are a
forecast. A job of which nothing is known is expected to run for as long again as it has run, which is true on average
of durations with a long tail.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.job.past_attempts import running_seconds
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

REMEMBERED: Final = 20
"""Maximum number of run times kept for the jobs of one user and name."""
MOST_LIKES: Final = 10_000
ENOUGH: Final = 3
"""Minimum number of run times for a forecast."""


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


class KnownLikes(set[Like]):
    """The ``Like`` keys with enough run times for a forecast; ``version`` counts the changes."""

    version = 0


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The newest run times of jobs that succeeded, in seconds, the oldest first.

    ``reported`` is the time that running jobs report to need still.
    """

    known: Mapping[Like, Sequence[float]] = field(default_factory=dict)
    reported: Mapping[JobId, float] = field(default_factory=dict)
    enough: AbstractSet[Like] | None = None

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
        if not longer:
            return None
        return TimeLeft(median(longer) - ran, Basis.HISTORY, len(times))

    def likes(self) -> AbstractSet[Like]:
        """Return the keys with enough run times for a forecast. The set of a ``RunTimeHistory`` changes as jobs end."""
        if self.enough is not None:
            return self.enough
        return frozenset(who for who, times in self.known.items() if len(times) >= ENOUGH)


class RunTimeHistory:
    """Learns run times from the records of jobs that end. ``view`` also shows what is learned later."""

    def __init__(self) -> None:
        self._known: dict[Like, tuple[float, ...]] = {}
        self._enough = KnownLikes()
        self.view = RunTimes(self._known, enough=self._enough)

    def ended(self, job: Job) -> None:
        """Record the run time of a job that has just ended."""
        if (seconds := _run_time(job)) is not None:
            times = self._known.pop(like(job), ())  # inserted again below, to be forgotten last
            self._set(like(job), (*times, seconds)[-REMEMBERED:])
            if len(self._known) > MOST_LIKES:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._enough.discard(oldest)
                self._enough.version += 1

    def remember(self, jobs: Iterable[Job]) -> None:
        """Record the run times of jobs that ended before those that are known."""
        for job in sorted(jobs, key=lambda job: job.ended_at or 0.0, reverse=True):
            times = self._known.get(like(job), ())
            room = len(times) < REMEMBERED and (times or len(self._known) < MOST_LIKES)
            if room and (seconds := _run_time(job)) is not None:
                self._set(like(job), (seconds, *times))

    def _set(self, who: Like, times: tuple[float, ...]) -> None:
        self._known[who] = times
        if len(times) >= ENOUGH and who not in self._enough:
            self._enough.add(who)
            self._enough.version += 1


def _run_time(job: Job) -> float | None:
    """Return the run time in a job's record; None if the job did not succeed, or never ran."""
    seconds = ran_seconds(job, job.ended_at or 0.0)
    return seconds if job.state is JobState.SUCCEEDED and seconds > 0 else None


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
