"""Intervals for series whose neighbouring values resemble each other: the circular block bootstrap.

Blocks of neighbours are drawn, not single values, so that a resampled series is as sluggish as the measured one. Their
length follows from the correlation of neighbours: a few times the number of values that are worth one independent value.
Long blocks are few, which makes the interval too narrow; it is widened by the quantile of Student's distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.analysis.reading.series import Floats

DRAWS: Final = 2000
CONFIDENCE: Final = 0.95
LEAST_VALUES: Final = 8
LEAST_BLOCKS: Final = 6
MOST_BLOCKS: Final = 200
"""More blocks say nothing more, and take longer to draw."""
BLOCK_FACTOR: Final = 4.0
SEED: Final = 20090331
"""Of the generator: the same data give the same interval every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with the bounds between which it lies with ``confidence``; no bounds where the data do not give any."""

    value: float
    low: float | None
    high: float | None
    confidence: float = CONFIDENCE

    @property
    def excludes_zero(self) -> bool:
        """Whether the figure differs from 0 by more than chance explains."""
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


def block_length(values: Floats) -> int | None:
    """How many neighbours make a block: several times as many as resemble each other; None for a series too short for that."""
    count = len(values)
    if count < LEAST_VALUES:
        return None
    centred = values - values.mean()
    variance = float(centred @ centred)
    if variance <= (1e-9 * float(abs(values).max())) ** 2 * count:
        return max(1, math.ceil(count / MOST_BLOCKS))
    nearest = float(centred[1:] @ centred[:-1]) / variance
    # The estimate is too low for short series, by about (1 + 4 r) / n (Kendall 1954).
    nearest = min(0.99, max(0.0, nearest + (1.0 + 4.0 * nearest) / count))
    alike = (1.0 + nearest) / (1.0 - nearest)
    wanted = BLOCK_FACTOR * alike if nearest > 2.0 / math.sqrt(count) else 1.0
    most = count // LEAST_BLOCKS
    return min(most, math.ceil(max(wanted, count / MOST_BLOCKS))) if wanted <= 2 * most else None


def resampled_means(values: Floats, length: int, generator: np.random.Generator, draws: int = DRAWS) -> Floats:
    """The means of resampled series; quick for long series, too."""
    count = len(values)
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[:length])))))
    starts = generator.integers(0, count, size=(draws, blocks_of(count, length)))
    means: Floats = (sums[starts + length] - sums[starts]).sum(axis=1) / (starts.shape[1] * length)
    return means


def blocks_of(count: int, length: int) -> int:
    """How many blocks a resampled series consists of."""
    return max(1, round(count / length))


def mean_interval(values: Floats, *, confidence: float = CONFIDENCE) -> Interval:
    """The mean of a series with its interval; without bounds for a series that is too short for one."""
    value, length = float(values.mean()), block_length(values)
    if length is None:
        return Interval(value=value, low=None, high=None, confidence=confidence)
    means = resampled_means(values, length, np.random.default_rng(SEED))
    half = _half_width(means, (blocks_of(len(values), length),), confidence)
    return Interval(value=value, low=value - half, high=value + half, confidence=confidence)


def difference_interval(first: Floats, second: Floats, *, confidence: float = CONFIDENCE) -> Interval:
    """How much the mean of ``second`` exceeds that of ``first``; without bounds where either is too short for one."""
    value = float(second.mean() - first.mean())
    one, other = block_length(first), block_length(second)
    if one is None or other is None:
        return Interval(value=value, low=None, high=None, confidence=confidence)
    generator = np.random.default_rng(SEED)
    found = resampled_means(second, other, generator) - resampled_means(first, one, generator)
    half = _half_width(found, (blocks_of(len(first), one), blocks_of(len(second), other)), confidence)
    return Interval(value=value, low=value - half, high=value + half, confidence=confidence)


def statistic_interval(
    columns: tuple[Floats, ...], statistic: Callable[..., float], *, confidence: float = CONFIDENCE, draws: int = 500
) -> Interval:
    """A statistic of columns that belong together, row by row, with its interval."""
    count, value = len(columns[0]), statistic(*columns)
    lengths = [length for column in columns if (length := block_length(column)) is not None]
    if len(lengths) < len(columns) or not math.isfinite(value):
        return Interval(value=value, low=None, high=None, confidence=confidence)
    length = max(lengths)
    starts = np.random.default_rng(SEED).integers(0, count, size=(draws, blocks_of(count, length)))
    places = ((starts[:, :, None] + np.arange(length)) % count).reshape(draws, -1)
    found = np.array([statistic(*(column[place] for column in columns)) for place in places])
    found = found[np.isfinite(found)]
    if len(found) < draws / 2:
        return Interval(value=value, low=None, high=None, confidence=confidence)
    half = _half_width(found, (blocks_of(count, length),), confidence)
    return Interval(value=value, low=value - half, high=value + half, confidence=confidence)


def _half_width(found: Floats, blocks: tuple[int, ...], confidence: float) -> float:
    """Half the width of the interval: the spread of the resampled figures, as few blocks as there are allowed for."""
    freedom = max(1, sum(count - 1 for count in blocks))
    # Resampled blocks vary about the mean of the series itself, which takes away the variation of one block in all.
    short = math.sqrt(min(blocks) / max(1, min(blocks) - 1))
    return student_quantile(0.5 + confidence / 2, freedom) * float(found.std()) * short


def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's distribution, from that of the normal one by Cornish and Fisher's expansion."""
    from statistics import NormalDist

    z = NormalDist().inv_cdf(share)
    if freedom < 3:  # the expansion is no good there
        return {1: 12.706, 2: 4.303}[freedom] if math.isclose(share, 0.975) else 3.0 * z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
