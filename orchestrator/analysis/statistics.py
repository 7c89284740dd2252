"""Statistics of series: means over time, spread, energy, and intervals of means whose neighbouring values resemble each other.

The error of a mean follows from the slow movements of the series: its first cosine components. Few of them are used, and
Student's distribution accounts for their number. The correlation of neighbours makes the slowest components the
largest; by a model of it (each value is a part of its neighbour plus noise) the others are scaled up to them. The
series has to be stationary; the published forms are by Mueller (2007) and by Lazarus, Lewis, Stock and Watson (2018).
A block bootstrap, used here before, covered 54 % instead of 95 % with 50 values and a correlation of neighbours of 0.8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.runs import Quantity

if TYPE_CHECKING:
    from orchestrator.analysis.runs import Floats, GpuSeries

LEAST_GAP_SECONDS: Final = 5.0
GAP_PERIODS: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One quantity over a run, in its display unit; the mean is over time."""

    mean: float
    std: float
    minimum: float
    maximum: float
    p95: float
    count: int


def bin_sums(places: Floats, values: Floats, edges: Floats) -> Floats:
    """Return the sum of the values in each bin between edges; a place beyond the edges counts in the bin beside it."""
    count = len(edges) - 1
    at = np.clip(np.searchsorted(edges, places, side="right") - 1, 0, count - 1)
    sums: Floats = np.bincount(at, weights=values, minlength=count).astype(np.float64)
    return sums


def bin_means(places: Floats, values: Floats, edges: Floats) -> Floats:
    """Return the mean of the known values in each bin; NaN in an empty one."""
    places, values = known(places, values)
    counts = bin_sums(places, np.ones(len(places)), edges)
    return np.where(counts > 0, bin_sums(places, values, edges) / np.maximum(counts, 1), np.nan)


def longest_gap(times: Floats) -> float:
    """Return the seconds between two samples beyond which the values in between are unknown."""
    if len(times) < 2:
        return LEAST_GAP_SECONDS
    return max(LEAST_GAP_SECONDS, GAP_PERIODS * float(np.median(np.diff(times))))


def known(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the moments with a value."""
    there = np.isfinite(values)
    return times[there], values[there]


def integral(times: Floats, values: Floats) -> tuple[float, float]:
    """Return the integral of values over time by the trapezoid rule, and the seconds that it covers; gaps are left out."""
    times, values = known(times, values)
    spans = np.diff(times)
    covered = spans <= longest_gap(times)
    middles = (values[1:] + values[:-1]) / 2
    return float((spans * middles)[covered].sum()), float(spans[covered].sum())


def mean_over_time(times: Floats, values: Floats) -> float | None:
    """Return the mean over time; for a few samples far apart their plain mean; None without any value."""
    total, seconds = integral(times, values)
    if seconds > 0:
        return total / seconds
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def summarize(times: Floats, values: Floats) -> Summary | None:
    """Return mean, spread and extremes of values; None when there are none."""
    mean = mean_over_time(times, values)
    if mean is None:
        return None
    there = values[np.isfinite(values)]
    return Summary(
        mean=mean,
        std=float(there.std()),
        minimum=float(there.min()),
        maximum=float(there.max()),
        p95=float(np.percentile(there, 95)),
        count=len(there),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnergyCurve:
    """Joules that a GPU had used by each of ``times``, since the first one; ``counted``: by the hardware's counter."""

    times: Floats
    joules: Floats
    counted: bool

    @property
    def total(self) -> float:
        """Joules in all."""
        return float(self.joules[-1]) if len(self.joules) else 0.0

    def between(self, start: float, end: float) -> float:
        """Return joules used between two moments (Unix time)."""
        if not len(self.times) or end <= start:
            return 0.0
        first, last = np.interp([start, end], self.times, self.joules)
        return float(last - first)


def energy_curve(gpu: GpuSeries) -> EnergyCurve | None:
    """Return the energy of a GPU: by its counter, which restarts with its driver, else by integrating power."""
    times, counter = known(gpu.times, gpu.energy_joules)
    if len(times) > 1 and counter.max() > counter.min():
        grown = np.maximum(np.diff(counter), 0.0)
        return EnergyCurve(times=times, joules=np.concatenate(([0.0], np.cumsum(grown))), counted=True)
    power = gpu.values.get(Quantity.POWER)
    if power is None:
        return None
    times, power = known(gpu.times, power)
    if len(times) < 2:
        return None
    spans = np.diff(times)
    parts = np.where(spans <= longest_gap(times), spans * (power[1:] + power[:-1]) / 2, 0.0)
    return EnergyCurve(times=times, joules=np.concatenate(([0.0], np.cumsum(parts))), counted=False)


CONFIDENCE: Final = 0.95
LEAST_VALUES: Final = 8
MAX_VALUES: Final = 1000
"""Longer series are replaced by means of neighbours: more values give no more information, and take longer."""
BIAS: Final = (1.75, 8.0)
"""Coefficients of 1/n and 1/n² in the correction of the likeness, by simulation (benchmarks/analysis_figures.py): short series hide more than
the bias of the likeness, and below 50 values the likeness of a series is a poor estimate."""
MAX_BIAS: Final = 0.2
MAX_ALIKE: Final = 0.985
LEAST_FLAT: Final = 0.9
"""As many components are used as have a mean size, by the model, of at least this share of the slowest one's."""
LEAST_COMPONENTS: Final = 2


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the bounds between which it lies with ``confidence``; no bounds where the data do not give any."""

    value: float
    low: float | None = None
    high: float | None = None
    confidence: float = CONFIDENCE

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both bounds; None without them."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def divided(self, by: float) -> Interval:
        """Return the figure and its bounds, divided by a positive number."""
        low, high = (None if bound is None else bound / by for bound in (self.low, self.high))
        return Interval(self.value / by, low, high, self.confidence)

    def ends(self, form: str, without: str = "") -> str:
        """Return the bounds as text, each in this format; ``without`` where there are none."""
        return without if self.bounds is None else "-".join(f"{bound:{form}}" for bound in self.bounds)

    @property
    def excludes_zero(self) -> bool:
        """Whether the figure differs from 0 by more than chance explains."""
        return self.bounds is not None and not self.bounds[0] <= 0.0 <= self.bounds[1]


def mean_interval(values: Floats, *, confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of a series with its interval; without bounds for a series that is too short for one."""
    return interval_about(float(values.mean()), values, confidence=confidence)


def interval_about(value: float, influence: Floats, *, confidence: float = CONFIDENCE) -> Interval:
    """Return a figure with the interval of the mean of ``influence``: by how much each row moves the figure."""
    half = _half_width(influence, confidence)
    if half is None:
        return Interval(value, confidence=confidence)
    return Interval(value, value - half, value + half, confidence)


def _half_width(values: Floats, confidence: float) -> float | None:
    if len(values) < LEAST_VALUES:
        return None
    largest = float(np.abs(values).max())
    values = _thinned(values)
    centred, count = values - values.mean(), len(values)
    if float(centred @ centred) <= (1e-9 * largest) ** 2 * count:
        return 0.0
    alike = likeness(centred)
    shape = _shape(alike, count)
    number = _components(shape)
    frequencies = math.pi * np.arange(1, number + 1) / count
    weights = np.cos(np.outer(frequencies, np.arange(count) + 0.5))
    squares = 2.0 / count * (weights @ centred) ** 2 / shape[:number]
    return student_quantile(0.5 + confidence / 2, number) * math.sqrt(float(squares.mean()) / count)


def _thinned(values: Floats) -> Floats:
    """Return at most MAX_VALUES means of equally many neighbours; a rest at the end is left out."""
    length = math.ceil(len(values) / MAX_VALUES)
    means: Floats = values[: len(values) // length * length].reshape(-1, length).mean(axis=1)
    return means


def likeness(centred: Floats) -> float:
    """Return the correlation of neighbouring values, from 0 to MAX_ALIKE, corrected for the bias of short series."""
    count = len(centred)
    measured = float(centred[1:] @ centred[:-1]) / float(centred @ centred)
    # The estimate is too low by (1 + 4 r) / n (Kendall 1954) and, close to 1, by more.
    bias = min(MAX_BIAS, BIAS[0] / count + BIAS[1] / count**2)
    return min(MAX_ALIKE, max(0.0, (measured + bias) / (1.0 - 4.0 * bias)))


def _shape(alike: float, count: int) -> Floats:
    """Return the size of the components by the model, relative to the slowest one of an infinite series."""
    most = min(count // 2, int(0.8 * count ** (2 / 3)) + LEAST_COMPONENTS)
    frequencies = math.pi * np.arange(1, most + 1) / count
    shape: Floats = (1.0 - alike) ** 2 / (1.0 - 2.0 * alike * np.cos(frequencies) + alike**2)
    return shape


def _components(shape: Floats) -> int:
    means = np.cumsum(shape) / np.arange(1, len(shape) + 1)
    flat = np.flatnonzero(means >= LEAST_FLAT)
    return max(LEAST_COMPONENTS, int(flat[-1]) + 1 if len(flat) else 0)


def student_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's distribution, from that of the normal one by Cornish and Fisher's expansion."""
    from statistics import NormalDist

    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        return (2 * share - 1) * math.sqrt(1 / (2 * share * (1 - share)))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** (power + 1) for power, term in enumerate(terms))
