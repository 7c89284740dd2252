"""Figures with their standard errors, from samples with outliers; differences are expressed in standard errors. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

TRIMMED: Final = 0.2
"""This share of the samples is left out at each end: a save or an evaluation in the window changes no figure."""
FEW: Final = 3.0
"""The true spread of n samples may be larger than measured, by the share ``FEW`` / n."""
LEAST_ERROR: Final = 1e-3
"""Least error, as a share of the value: no clock and no window is more exact than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """``value`` is the trimmed mean of samples and ``error`` its standard error."""

    value: float
    error: float


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the trimmed mean, and its error by the winsorized deviation. There are at least two ``samples``."""
    ordered, cut = sorted(samples), int(TRIMMED * len(samples))
    kept = ordered[cut : len(ordered) - cut]
    value = fmean(kept)
    ordered[:cut], ordered[len(ordered) - cut :] = kept[:1] * cut, kept[-1:] * cut  # winsorized
    share = len(kept) / len(ordered)
    error = (1.0 + FEW / len(ordered)) * _deviation(ordered) / (share * math.sqrt(len(ordered)))
    return Estimate(value=value, error=max(error, LEAST_ERROR * abs(value)))


def share(hits: int, looks: int) -> Estimate:
    """Return the share of ``looks``, at least one, that were hits. The error is that of a share further from 0 and 1, so that a few looks that are all alike prove little."""
    middle = (hits + 2.0) / (looks + 4.0)  # Agresti and Coull, Approximate is better than "exact", 1998
    return Estimate(value=hits / looks, error=math.sqrt(middle * (1.0 - middle) / (looks + 4.0)))


def _deviation(values: Sequence[float]) -> float:
    """Return the sample's standard deviation. ``statistics`` computes it in fractions and takes a hundred times as long."""
    return math.dist(values, [fmean(values)] * len(values)) / math.sqrt(len(values) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value, the others' typical one (``usual``), and the difference in standard errors (``deviations``)."""

    value: float
    usual: float
    deviations: float


def typical(estimates: Sequence[Estimate]) -> float:
    """Return the median of the values."""
    return median([one.value for one in estimates])


def above(one: Estimate, others: Sequence[Estimate]) -> Difference:
    """Compare one with the others' median. Where its error is smaller than theirs, the median of theirs is used."""
    usual, spread = typical(others), median([other.error for other in others])
    error = math.hypot(max(one.error, spread), 1.25 * spread / math.sqrt(len(others)))
    return Difference(value=one.value, usual=usual, deviations=(one.value - usual) / error if error else 0.0)
