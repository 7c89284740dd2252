"""Means with intervals of true coverage: bootstrap over runs, widened for few runs; ratios of runs of the same round.

A run is the unit: steps of a run are correlated, runs are made far apart and alternate with those of other cells.
"""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.statistics import Interval, student_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES: Final = 10_000
FEWEST_RUNS: Final = 5
_SEED: Final = 1_609
_OUTLIER_REACH: Final = 1.5  # of the interquartile range, as in Tukey's box plot


def tail(runs: int) -> float:
    """Return the share at which a bootstrap of these runs is read: below 0.025, as resampling makes few look alike.

    A bootstrap spreads as if the runs' variance were (n-1)/n of its estimate, and does not use Student's t. Reading it
    further out corrects both.
    """
    reach = -math.sqrt(runs / (runs - 1)) * student_quantile(0.975, runs - 1)
    return NormalDist().cdf(reach)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least one value and its 95 % bootstrap interval."""
    return ratio_interval(values, [1.0] * len(values))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of two cells' means, resampled by rounds: effects on a round (heat, other load) cancel out.

    Only the rounds that both have are used; their sequences are cut to the shorter.
    """
    runs = min(len(above), len(below))
    first, second = np.asarray(above[:runs], dtype=float), np.asarray(below[:runs], dtype=float)
    ratio = math.fsum(first) / math.fsum(second)
    if runs < FEWEST_RUNS:
        return Interval(ratio)
    picks = np.random.default_rng(_SEED).integers(0, runs, size=(RESAMPLES, runs))
    low, high = np.quantile(first[picks].mean(axis=1) / second[picks].mean(axis=1), [tail(runs), 1 - tail(runs)])
    return Interval(ratio, float(low), float(high))


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for one value."""
    return stdev(values) if len(values) > 1 else 0.0


def relative_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean as a share of the mean; a fifth is assumed for one value."""
    return stdev(values) / fmean(values) / math.sqrt(len(values)) if len(values) > 1 else 0.2


def outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of values far from the others. They are reported, and never left out."""
    if len(values) < FEWEST_RUNS:
        return ()
    low, high = np.quantile(values, [0.25, 0.75])
    reach = _OUTLIER_REACH * (high - low)
    return tuple(i for i, value in enumerate(values) if not low - reach <= value <= high + reach)
