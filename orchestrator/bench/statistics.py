"""Means with intervals of true coverage: bootstrap over runs, widened for few runs; ratios of runs of the same round.

A run is the unit: steps of a run are correlated, runs are made far apart and alternate with those of other cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES: Final = 10_000
FEWEST_RUNS: Final = 5
_SEED: Final = 1_609
_OUTLIER_REACH: Final = 1.5  # of the interquartile range, as in Tukey's box plot


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, or a ratio of means, with its 95 % interval; None where there are too few runs for one."""

    mean: float
    low: float | None = None
    high: float | None = None

    def divided(self, by: float) -> Interval:
        """Return the mean and both ends, divided."""
        low, high = (None if end is None else end / by for end in (self.low, self.high))
        return Interval(self.mean / by, low, high)

    def as_json(self) -> list[float] | None:
        """Return the two ends."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def tail(runs: int) -> float:
    """Return the share at which a bootstrap of these runs is read: below 0.025, as resampling makes few look alike.

    A bootstrap spreads as if the runs' variance were (n-1)/n of its estimate, and does not use Student's t. Reading it
    further out corrects both.
    """
    reach = -math.sqrt(runs / (runs - 1)) * _student(runs - 1)
    return NormalDist().cdf(reach)


def _student(freedom: int) -> float:
    """Return Student's t for a two-sided 95 %, by its expansion around the normal: within 1 % from 4 degrees on."""
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least one value and its 95 % bootstrap interval."""
    mean = math.fsum(values) / len(values)
    if len(values) < FEWEST_RUNS:
        return Interval(mean)
    import numpy as np

    runs = np.asarray(values, dtype=float)
    means = runs[_picks(len(runs))].mean(axis=1)
    low, high = np.quantile(means, _ends(len(runs)))
    return Interval(mean, float(low), float(high))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two cells' means, resampled by rounds: effects on a round (heat, other load) cancel out.

    Only the rounds that both have are used; their sequences are cut to the shorter.
    """
    size = min(len(above), len(below))
    first, second = above[:size], below[:size]
    ratio = math.fsum(first) / math.fsum(second)
    if size < FEWEST_RUNS:
        return Interval(ratio)
    import numpy as np

    picks = _picks(size)
    ratios = np.asarray(first)[picks].mean(axis=1) / np.asarray(second)[picks].mean(axis=1)
    low, high = np.quantile(ratios, _ends(size))
    return Interval(ratio, float(low), float(high))


def _picks(runs: int) -> Any:
    import numpy as np

    return np.random.default_rng(_SEED).integers(0, runs, size=(RESAMPLES, runs))


def _ends(runs: int) -> tuple[float, float]:
    low = tail(runs)
    return low, 1 - low


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for one value."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def relative_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean as a share of the mean; a fifth is assumed for one value."""
    if len(values) < 2:
        return 0.2
    mean = math.fsum(values) / len(values)
    return deviation(values) / mean / math.sqrt(len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of values far from the others. They are reported, and never left out."""
    if len(values) < FEWEST_RUNS:
        return ()
    low, high = quantile(values, 0.25), quantile(values, 0.75)
    reach = _OUTLIER_REACH * (high - low)
    return tuple(i for i, value in enumerate(values) if not low - reach <= value <= high + reach)
