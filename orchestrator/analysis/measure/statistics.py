"""Means over time, not over samples; spread; energy from the counter, else from power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.reading.series import Quantity

if TYPE_CHECKING:
    from orchestrator.analysis.reading.series import Floats, GpuSeries

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
