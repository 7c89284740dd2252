"""How long jobs may still run, and what that is known from. Pure.

``max_duration`` is a limit that the daemon enforces. The run times of earlier jobs of the same user and name are a forecast; so is
that a job of which nothing is known runs as long again as it has: what is true on average of durations with a long tail.
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
"""Run times that are kept of the jobs of one user and name."""
MOST_LIKES: Final = 10_000
ENOUGH: Final = 3
"""Fewer say nothing."""


class Basis(StrEnum):
    """What an expected duration is known from."""

    LIMIT = "max_duration"
    PROGRESS = "its progress"
    HISTORY = "like jobs"
    ELAPSED = "time so far"


class Like(NamedTuple):
    """Jobs that are taken for alike."""

    user: str
    name: str


class TimeLeft(NamedTuple):
    """Seconds of running that are expected from now on, what that is known from, and of how many jobs."""

    seconds: float
    basis: Basis
    jobs: int = 0


class Clock(NamedTuple):
    """What tells how long a job may still run; the same for as long as its record is.

    ``ran`` are the seconds of its attempts that have ended, ``since`` is when all ranks of the one that has not were up, ``limit`` its ``max_duration``, which
    counts from ``limit_since`` on. ``over_at`` is when it lets go of its gang because it was stopped for good; 0 where its ranks have ended.
    """

    like: Like
    ran: float
    since: float | None
    limit: float | None
    limit_since: float | None
    over_at: float | None

    def ran_until(self, now: float) -> float:
        """How long its attempts have run."""
        return self.ran if self.since is None else self.ran + max(0.0, now - self.since)

    def limit_left(self, now: float) -> float | None:
        """The seconds after which ``max_duration`` ends the job; None without one."""
        if self.limit is None:
            return None
        since = now if self.limit_since is None else self.limit_since
        return max(0.0, since + self.limit - now)


class KnownLikes(set[Like]):
    """Those of whose like jobs enough is known; ``version`` counts the changes."""

    version = 0


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The newest run times of jobs that succeeded, in seconds, the oldest first; ``reported`` is what running jobs say that they still need."""

    known: Mapping[Like, Sequence[float]] = field(default_factory=dict)
    reported: Mapping[JobId, float] = field(default_factory=dict)
    enough: AbstractSet[Like] | None = None

    def left(self, job: Job, now: float) -> TimeLeft | None:
        """The time that the job still runs, of one that waits from its start on; None where nothing is known of it."""
        return self.left_by(clock_of(job), job.id, now)

    def left_by(self, clock: Clock, job_id: JobId, now: float) -> TimeLeft | None:
        """The time that the job of a clock still runs."""
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
        """By how much the median of those before was wrong for the like jobs that have ended, as a part of what it took: the median."""
        times = self.known.get(like(job), ())
        wrong = [abs(median(times[:n]) - took) / max(took, 1.0) for n, took in enumerate(times) if n >= ENOUGH]
        return median(wrong) if wrong else None

    def of_like(self, who: Like, ran: float) -> TimeLeft | None:
        """The median of what is left to those like jobs that ran longer; None where too little is known of them."""
        known = self.known.get(who, ())
        if len(known) < ENOUGH:
            return None
        times = sorted(known)
        longer = times[bisect_right(times, ran) :]
        if not longer:
            return None
        return TimeLeft(median(longer) - ran, Basis.HISTORY, len(times))

    def likes(self) -> AbstractSet[Like]:
        """Those of whose like jobs enough is known. What ``RunTimeHistory`` shows is kept, and grows."""
        if self.enough is not None:
            return self.enough
        return frozenset(who for who, times in self.known.items() if len(times) >= ENOUGH)


class RunTimeHistory:
    """Learns run times from the records of jobs that end. ``view`` shows what is known, also what is learned later."""

    def __init__(self) -> None:
        self._known: dict[Like, tuple[float, ...]] = {}
        self._enough = KnownLikes()
        self.view = RunTimes(self._known, enough=self._enough)

    def ended(self, job: Job) -> None:
        """Take in a job that has just ended."""
        if (seconds := _run_time(job)) is not None:
            times = self._known.pop(like(job), ())  # and those that ended last are the last to be forgotten
            self._set(like(job), (*times, seconds)[-REMEMBERED:])
            if len(self._known) > MOST_LIKES:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._enough.discard(oldest)
                self._enough.version += 1

    def remember(self, jobs: Iterable[Job]) -> None:
        """Take in jobs that ended before those that are known."""
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
    """What the record says of how long such jobs run; nothing of one that did not succeed."""
    seconds = ran_seconds(job, job.ended_at or 0.0)
    return seconds if job.state is JobState.SUCCEEDED and seconds > 0 else None


def like(job: Job) -> Like:
    """What the job is like."""
    return Like(job.submission.user, job.name)


def clock_of(job: Job) -> Clock:
    """Return what tells how long the job may still run."""
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
        limit_since=job.started_at,
        over_at=0.0 if job.succeeded and over_at is None else over_at,
    )


def ran_seconds(job: Job, now: float) -> float:
    """How long the job's attempts have run."""
    return clock_of(job).ran_until(now)


def limit_left(job: Job, now: float) -> float | None:
    """The seconds after which ``max_duration`` ends the job; None without one. It counts from the first time that all ranks were up."""
    return None if job.spec.max_duration is None else clock_of(job).limit_left(now)
