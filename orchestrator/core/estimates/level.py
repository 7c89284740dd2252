"""Forecasts the time of coming steps, and the error of a sum of them, by exponential smoothing of blocks of steps.

The more the time of a step drifts, the more the newest blocks count and the faster the bounds grow. The smoothing is
the one that would have forecast each block from those before it best; without drift it is the plain mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.estimates.intervals import Interval

MOST_BLOCKS: Final = 40
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
    count = min(MOST_BLOCKS, len(intervals))
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
