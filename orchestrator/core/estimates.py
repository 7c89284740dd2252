"""Estimates how long a job will still run, with an interval. Other packages need only ``time_left``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MARKS: Final = 512
SPACING_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Mark:
    """By ``at`` (Unix time) the attempt had done ``step`` steps, and was in ``phase`` from then on."""

    at: float
    attempt: int
    step: int
    phase: str = ""


class StepHistory:
    """At most ``most`` marks of a job. If there are more, every second goes, and later ones are kept half as often."""

    __slots__ = ("_marks", "_most", "_spacing")

    def __init__(self, most: int = MAX_MARKS, spacing: float = SPACING_SECONDS) -> None:
        self._most = most
        self._spacing = spacing
        self._marks: list[Mark] = []

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The marks, the oldest first."""
        return tuple(self._marks)

    def add(self, mark: Mark) -> bool:
        """Keep a mark that adds something new; return whether it was kept."""
        last = self._marks[-1] if self._marks else None
        if last is not None and last.attempt == mark.attempt:
            if mark.step == last.step and mark.phase != last.phase and mark.at - last.at < self._spacing:
                self._marks[-1] = Mark(last.at, last.attempt, last.step, mark.phase)
                return True
            if mark.at - last.at < self._spacing or (mark.step == last.step and mark.phase == last.phase):
                return False
        elif last is not None and mark.attempt < last.attempt:
            return False
        self._marks.append(mark)
        if len(self._marks) > self._most:
            self._thin()
        return True

    def _thin(self) -> None:
        """Drop every second mark, except the newest and the first of each attempt."""
        self._spacing *= 2
        marks = self._marks
        kept = [
            marks[place]
            for place in range(len(marks) - 1)
            if place % 2 == 0 or marks[place].attempt != marks[place - 1].attempt
        ]
        self._marks = [*kept, marks[-1]][-self._most :]


ENOUGH_OF_AN_ATTEMPT: Final = 8
"""Number of intervals; with fewer, an attempt's steps are assumed to be like those of the attempts before it."""
SLOW_START: Final = 1.5
STOP_FACTOR: Final = 2.0
LABELLED_STOP_FACTOR: Final = 0.5
NOT_TRAINING: Final = ("eval", "valid", "test", "checkpoint", "sav", "sampl", "infer")


@dataclass(frozen=True, slots=True)
class Interval:
    """Span between two marks of one attempt: ``steps`` (at least 1) in ``seconds``.

    ``labelled``: by its phase, the job was not training in a part of it.
    """

    attempt: int
    step: int
    steps: int
    seconds: float
    labelled: bool = False

    @property
    def step_seconds(self) -> float:
        """Seconds for a step."""
        return self.seconds / self.steps


@dataclass(frozen=True, slots=True)
class Stop:
    """Time without steps, in addition to the time of the steps, before the job reached ``step``."""

    step: int
    seconds: float
    labelled: bool


@dataclass(frozen=True, slots=True)
class Course:
    """Steps of a job without the stops, and the stops. There is at least one interval; ``begin`` is the step before."""

    begin: int
    intervals: tuple[Interval, ...]
    stops: tuple[Stop, ...]

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return sum(one.steps for one in self.intervals)


def course_of(marks: Sequence[Mark]) -> Course | None:
    """Return the course of the newest attempt, or of all if that is too short; None if no step was measured."""
    by_attempt: dict[int, list[Interval]] = {}
    for one in _intervals(marks):
        by_attempt.setdefault(one.attempt, []).append(one)
    warm = [_without_warm_up(found) for found in by_attempt.values()]
    if not any(warm):
        return None
    newest = warm[-1] if marks[-1].attempt in by_attempt else []
    found = newest if len(newest) >= ENOUGH_OF_AN_ATTEMPT else [one for attempt in warm for one in attempt]
    return _apart(found)


def _intervals(marks: Sequence[Mark]) -> list[Interval]:
    """Return the intervals between marks; each includes the time before it in which no step was done."""
    found: list[Interval] = []
    start, labelled = None, False
    for mark in marks:
        if start is None or mark.attempt != start.attempt or mark.step < start.step or mark.at < start.at:
            start, labelled = mark, False
        elif mark.step > start.step:
            labelled = labelled or is_stop(start.phase)
            found.append(Interval(mark.attempt, mark.step, mark.step - start.step, mark.at - start.at, labelled))
            start, labelled = mark, False
        labelled = labelled or is_stop(mark.phase)
    return [one for one in found if one.seconds > 0.0]


def is_stop(phase: str) -> bool:
    """Whether a phase is one without steps, by its name."""
    return phase.lower().startswith(NOT_TRAINING)


def _without_warm_up(found: list[Interval]) -> list[Interval]:
    """Return the intervals without the first, and without slow ones after it, as long as they are few."""
    if len(found) < 3:
        return found[1:] or found
    usual = median(one.step_seconds for one in found[1:])
    first = 1
    while first < len(found) // 3 and found[first].step_seconds > SLOW_START * usual:
        first += 1
    return found[first:]


def _apart(found: Sequence[Interval]) -> Course:
    """Separate the stops from the intervals in which they are."""
    usual = median(one.step_seconds for one in found)
    usual_length = median(one.seconds for one in found)
    intervals, stops = [], []
    for one in found:
        more = one.seconds - one.steps * usual
        if more > (LABELLED_STOP_FACTOR if one.labelled else STOP_FACTOR) * usual_length:
            stops.append(Stop(one.step, more, one.labelled))
            intervals.append(Interval(one.attempt, one.step, one.steps, one.steps * usual))
        else:
            intervals.append(one)
    return Course(found[0].step - found[0].steps, tuple(intervals), tuple(stops))


MAX_BLOCKS: Final = 40
LEAST_BLOCKS: Final = 5
SMOOTHING: Final = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
CLEARLY_BETTER: Final = 0.97
"""Drift is assumed only if smoothing reduces the plain mean's squared error to this part: less may be chance."""


@dataclass(frozen=True, slots=True)
class Level:
    """Seconds of a step from now on. ``variance`` is that of a block's mean; None with too few ``blocks``."""

    step_seconds: float
    smoothing: float
    variance: float | None
    blocks: int
    block_steps: float

    def variance_of(self, steps: float) -> float | None:
        """Return the variance of the seconds that ``steps`` steps will take; None if it is not known."""
        if self.variance is None:
            return None
        ahead, a = max(steps / self.block_steps, 0.0), self.smoothing
        # Each error moves the level of all blocks after it by ``a`` times the error.
        sums = ahead + a * ahead * max(ahead - 1, 0) + a * a * max(ahead - 1, 0) * ahead * max(2 * ahead - 1, 0) / 6
        if a == 0.0:
            sums += ahead * ahead / self.blocks
        return self.variance * sums * self.block_steps**2


def level_of(intervals: Sequence[Interval]) -> Level:
    """Return the level after these intervals, of which there is at least one."""
    values, block_steps = _blocks(intervals)
    if len(values) < LEAST_BLOCKS:
        seconds, steps = sum(one.seconds for one in intervals), sum(one.steps for one in intervals)
        return Level(seconds / steps, 0.0, None, len(values), block_steps)
    forecasts = {a: _forecast(values, a) for a in SMOOTHING}
    plain = forecasts[0.0][1]
    best = min(SMOOTHING, key=lambda a: forecasts[a][1])
    if forecasts[best][1] > CLEARLY_BETTER * plain:
        best = 0.0
    level, squares = forecasts[best]
    alike = _alike(values) if best == 0.0 else 1.0
    return Level(level, best, squares * alike, len(values), block_steps)


def _alike(values: Sequence[float]) -> float:
    """Return how many neighbouring blocks are worth one independent block."""
    mean, count = fmean(values), len(values)
    centred = [value - mean for value in values]
    square = sum(value * value for value in centred)
    if square <= 0.0:
        return 1.0
    nearest = sum(one * other for one, other in pairwise(centred)) / square
    # The estimate is too low for short series, by about (1 + 4 r) / n (Kendall 1954).
    nearest = min(0.9, max(0.0, nearest + (1.0 + 4.0 * nearest) / count))
    return (1.0 + nearest) / (1.0 - nearest)


def _blocks(intervals: Sequence[Interval]) -> tuple[list[float], float]:
    """Return the mean step times of blocks with about equal numbers of steps, and the mean of those numbers."""
    steps = sum(one.steps for one in intervals)
    count = min(MAX_BLOCKS, len(intervals))
    values: list[float] = []
    done, seconds, within = 0, 0.0, 0
    for one in intervals:
        done, seconds, within = done + one.steps, seconds + one.seconds, within + one.steps
        if done * count >= (len(values) + 1) * steps:
            values.append(seconds / within)
            seconds, within = 0.0, 0
    if within:
        values.append(seconds / within)
    return values, steps / len(values)


def _forecast(values: Sequence[float], smoothing: float) -> tuple[float, float]:
    """Return the level after the last block, and the mean squared error of the forecasts of each next block."""
    level, total, weight = values[0], 0.0, 0.0
    for number, value in enumerate(values[1:], 1):
        error = value - level
        # The mean of a few blocks has an error itself: ``variance_of`` allows for that, and it must not count twice.
        total += error * error / (1.0 + 1.0 / number if smoothing == 0.0 else 1.0)
        weight += 1.0
        level += error * max(smoothing, 1.0 / (number + 1))
    return level, total / weight


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
