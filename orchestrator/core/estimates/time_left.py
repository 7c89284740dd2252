"""Estimates how long a job will still run, with an interval. Other packages need only ``time_left``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Final

from orchestrator.core.estimates.intervals import course_of
from orchestrator.core.estimates.level import level_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.estimates.history import Mark
    from orchestrator.core.estimates.intervals import Course, Stop

CONFIDENCE: Final = 0.95
LEAST_SHARE: Final = 0.01
END_SECONDS: Final = 1.0
"""Each bound allows for this in addition: reports come once a second, and the end of a script has no steps."""
REGULAR: Final = 0.25
ALIKE: Final = 2.0
UNSEEN: Final = 3.0
"""Stops may be this many times as frequent as one or two of them suggest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """Seconds that a job will still run. The bounds contain them with ``CONFIDENCE``; None if it is too early.

    ``stop_seconds`` of them are for evaluations and the like, ``step_seconds`` is the time of a step without those.
    """

    seconds: float
    low: float | None
    high: float | None
    step_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True)
class _Stops:
    """Time that stops will take: expected, its variance, how much more it may be, and the length of one."""

    seconds: float = 0.0
    variance: float = 0.0
    more: float = 0.0
    each: float = 0.0


def time_left(
    marks: Sequence[Mark], total_steps: int, *, step: int | None = None, now: float | None = None
) -> TimeLeft | None:
    """Return the seconds until ``total_steps`` are done; None if the marks do not show it.

    The time begins at ``step``, by default that of the newest mark. Without ``step``, what has passed from that mark to
    ``now`` is subtracted, up to the time of a step and a stop. Time in which the job does not run is not included, nor
    are restarts that are still to come.
    """
    if not marks or total_steps <= 0 or (course := course_of(marks)) is None:
        return None
    begin = marks[-1].step if step is None else step
    steps = max(0, total_steps - begin)
    level, stops = level_of(course.intervals), _stops_to_come(course, begin, total_steps)
    whole = steps * level.step_seconds + stops.seconds
    passed = 0.0
    if now is not None and step is None:
        passed = min(max(0.0, now - marks[-1].at), level.step_seconds + stops.each, whole)
    seconds, low, high = whole - passed, None, None
    variance = level.variance_of(steps)
    if variance is not None:
        spread = student(level.blocks - 1) * math.sqrt(variance + stops.variance)
        half = math.hypot(max(spread, LEAST_SHARE * seconds), END_SECONDS)
        low, high = max(0.0, seconds - half), seconds + math.hypot(half, stops.more)
    return TimeLeft(
        seconds=seconds,
        low=low,
        high=high,
        step_seconds=level.step_seconds,
        stop_seconds=min(stops.seconds, seconds),
    )


def _stops_to_come(course: Course, begin: int, total: int) -> _Stops:
    stops = course.stops
    if not stops or total <= begin:
        return _Stops()
    each, number = fmean(stop.seconds for stop in stops), len(stops)
    expected = number / course.steps * (total - begin)
    if not _recurring(stops):
        return _Stops(more=each * max(UNSEEN * expected, 1.0))
    spread = pstdev([stop.seconds for stop in stops]) ** 2
    period = _period(course)
    if period is None:
        uncertain = expected + expected**2 / number
    else:
        expected = float(max(0, math.floor((total - stops[-1].step) / period + REGULAR)))
        uncertain = (expected**2 / 4 if number == 1 else min(1.0, expected) / 4) if expected else 0.0
    return _Stops(
        seconds=expected * each,
        variance=expected * spread + expected**2 * spread / number + uncertain * each**2,
        each=each,
    )


def _recurring(stops: Sequence[Stop]) -> bool:
    """Whether stops are part of the job's course: by a phase's name, by their number, or as two of similar length."""
    lengths = [stop.seconds for stop in stops]
    if len(stops) >= 3 or any(stop.labelled for stop in stops):
        return True
    return len(stops) == 2 and max(lengths) <= ALIKE * min(lengths)


def _period(course: Course) -> float | None:
    """Return the steps from one stop to the next, if that is always about the same; else None."""
    places = [stop.step for stop in course.stops]
    if len(places) < 3:  # the first stop comes as late after the beginning as the second after the first
        places = [course.begin, *places]
    gaps = [gap for before, after in pairwise(places) if (gap := after - before) > 0]
    if not gaps or pstdev(gaps) > REGULAR * fmean(gaps):
        return None
    return fmean(gaps)


def student(freedom: int) -> float:
    """Return the quantile of Student's distribution for ``CONFIDENCE``, from the normal one (Cornish-Fisher)."""
    z = 1.959964
    if freedom < 3:
        return {1: 12.706, 2: 4.303}.get(freedom, 12.706)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
