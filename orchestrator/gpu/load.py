"""The load of a GPU over the last minute, and how evenly the load of a job's GPUs is spread.

The measure is the coefficient of variation: population standard deviation over mean, across the job's GPUs, of each
GPU's average over a minute. It has no value for a single GPU, nor while the job idles, where noise of 0 and 2 % would
read as 100 %. It shrinks with size, as one idle GPU of n gives 1/sqrt(n-1), so the least loaded GPU over the median one
is given beside it. GPUs that do not report are counted, because a GPU that stops reporting makes the others look
balanced. A rank that waits in a collective spins at full utilization: only power shows it.

Each GPU's exporter keeps the one window of its samples (`LoadWindow`), the daemon computes a job's balance from the
exporters' averages, and everything that shows or judges a balance reads that. Reads no clock and no device.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.thresholds import BALANCE_BANDS, BALANCE_SECONDS, UNUSED_UTILIZATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.gpu.sample import Sample


class Quantity(enum.StrEnum):
    """A quantity that is compared across GPUs."""

    UTILIZATION = "utilization"
    MEMORY = "memory"
    POWER = "power"


class Band(enum.StrEnum):
    """A rating of a spread."""

    EXCELLENT = "excellent"
    GOOD = "good"
    FAIR = "fair"
    POOR = "poor"


BANDS: Final = tuple(zip(BALANCE_BANDS, Band, strict=False))
"""(coefficient of variation below which the band holds, band); above them all it is poor."""


def band(cv: float) -> Band:
    """Return the band of a coefficient of variation (ratio)."""
    return next((name for below, name in BANDS if cv < below), Band.POOR)


def coefficient_of_variation(values: Sequence[float]) -> float | None:
    """Return the population standard deviation over the mean; None for fewer than two values, and where the mean is 0."""
    # statistics.pstdev computes in fractions and takes twenty times as long.
    mean = fmean(values) if len(values) > 1 else 0.0
    return math.sqrt(fmean((value - mean) ** 2 for value in values)) / mean if mean > 0.0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """A GPU's averages over a window: ratio, bytes, watts. None where no sample had the value."""

    utilization: float | None
    memory: float | None
    power: float | None

    def of(self, quantity: Quantity) -> float | None:
        """Return the average of one quantity."""
        match quantity:
            case Quantity.UTILIZATION:
                return self.utilization
            case Quantity.MEMORY:
                return self.memory
            case Quantity.POWER:
                return self.power


def mean_load(loads: Sequence[GpuLoad]) -> GpuLoad | None:
    """Return the averages of loads, as PromQL's `avg_over_time` computes them; None without any."""
    if not loads:
        return None
    return GpuLoad(
        utilization=known_mean(load.utilization for load in loads),
        memory=known_mean(load.memory for load in loads),
        power=known_mean(load.power for load in loads),
    )


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that were measured; None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class LoadWindow:
    """One GPU's newest samples. One thread adds, others may read."""

    def __init__(self, seconds: float = BALANCE_SECONDS) -> None:
        """Keep the last `seconds`."""
        self._seconds = seconds
        self._rows: deque[tuple[float, GpuLoad]] = deque()

    def add(self, sample: Sample) -> None:
        """Add a sample; they come in the order of their monotonic time."""
        used = sample.memory_used_bytes
        load = GpuLoad(
            utilization=sample.utilization, memory=None if used is None else float(used), power=sample.power_watts
        )
        self._rows.append((sample.monotonic, load))
        while self._rows[0][0] <= sample.monotonic - self._seconds:
            self._rows.popleft()

    def load(self, now: float, seconds: float = math.inf) -> GpuLoad | None:
        """Return the averages at monotonic time `now` over the last `seconds`, at most over the window; None without any."""
        since = now - min(self._seconds, seconds)
        return mean_load([load for at, load in self._rows.copy() if at > since])


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Distribution of one quantity over a job's GPUs."""

    quantity: Quantity
    cv: float
    min_per_median: float | None
    mean: float

    @property
    def band(self) -> Band:
        """Return the spread's band."""
        return band(self.cv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A job's balance: the spreads that have a value, how many GPUs it holds, and which of them do not report."""

    gpus: int
    silent: tuple[str, ...]
    spreads: tuple[Spread, ...]

    def spread(self, quantity: Quantity) -> Spread | None:
        """Return the spread of one quantity; None for an idle job or a single GPU."""
        return next((spread for spread in self.spreads if spread.quantity is quantity), None)

    @property
    def worst(self) -> Spread | None:
        """Return the wider of utilization's and power's spread, which show whether ranks wait for each other."""
        spreads = (self.spread(Quantity.UTILIZATION), self.spread(Quantity.POWER))
        return max((spread for spread in spreads if spread is not None), key=lambda spread: spread.cv, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the balance as JSON: `{"gpus", "silent", "band", "quantities": {...}}`.

        `band` is that of the worse of utilization and power; null for a single GPU and for an idle job.
        """
        return {
            "gpus": self.gpus,
            "silent": list(self.silent),
            "band": self.worst.band if self.worst is not None else None,
            "quantities": {
                spread.quantity: {
                    "cv": spread.cv,
                    "min_per_median": spread.min_per_median,
                    "mean": spread.mean,
                    "band": spread.band,
                }
                for spread in self.spreads
            },
        }


def balance(loads: Mapping[str, GpuLoad | None]) -> Balance:
    """Return a job's balance from its GPUs' loads by UUID; None for a GPU without a sample in the window."""
    present = [load for load in loads.values() if load is not None]
    busy = _values(present, Quantity.UTILIZATION)
    working = (
        not busy or fmean(busy) > UNUSED_UTILIZATION
    )  # without a utilization, power and memory still have a spread
    spreads = (_spread(quantity, _values(present, quantity)) for quantity in Quantity) if working else ()
    return Balance(
        gpus=len(loads),
        silent=tuple(uuid for uuid, load in loads.items() if load is None),
        spreads=tuple(spread for spread in spreads if spread is not None),
    )


def _values(loads: Iterable[GpuLoad], quantity: Quantity) -> list[float]:
    return [value for load in loads if (value := load.of(quantity)) is not None]


def _spread(quantity: Quantity, values: Sequence[float]) -> Spread | None:
    cv = coefficient_of_variation(values)
    if cv is None:
        return None
    middle = median(values)
    return Spread(
        quantity=quantity, cv=cv, min_per_median=min(values) / middle if middle > 0.0 else None, mean=fmean(values)
    )
