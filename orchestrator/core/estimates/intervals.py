"""Derives the times of a job's steps from its marks, without warm-up, restarts and stops.

A stop is time in which no step was done: an evaluation, a checkpoint, a pause. Recurring stops count for the time that
is left; a single one does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.estimates.history import Mark

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
