"""Measures how evenly the load of a job's GPUs is spread, in numbers that PromQL reproduces.

The measure is the coefficient of variation: population standard deviation over mean, across the job's GPUs, of each
GPU's average over a window. It has no value for a single GPU, nor while the job idles (mean utilization of 5 % or less),
where noise of 0 and 2 % would read as 100 %. It shrinks with size, as one idle GPU of n gives 1/sqrt(n-1), so the least
loaded GPU over the median one is given beside it. GPUs that do not report are counted, because a GPU that stops
reporting makes the others look balanced. A rank that waits in a collective spins at full utilization: only power shows it.

Works on values only: reads no clock and no device.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core import thresholds as d

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.gpu.sample import Sample

WINDOW_SECONDS: Final = 60.0
SETTLED_SECONDS: Final = 10.0
"""A job that has run for less than this has no balance: its ranks do not all start at once."""
IDLE_UTILIZATION: Final = d.COMPARABLE_UTILIZATION


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


BANDS: Final = ((d.CV_EXCELLENT, Band.EXCELLENT), (d.CV_GOOD, Band.GOOD), (d.CV_FAIR, Band.FAIR))
"""(coefficient of variation below which the band holds, band); above them all it is poor."""

ADVICE: Final = {
    Band.EXCELLENT: "Nothing to change.",
    Band.GOOD: "Watch how it develops; little is to be gained.",
    Band.FAIR: "Look at the batch sizes of the ranks and at data loading.",
    Band.POOR: "Check how the data is split over the ranks and how DDP is configured, then the ranks named here.",
}


def band(cv: float) -> Band:
    """Return the band of a coefficient of variation (ratio)."""
    return next((name for below, name in BANDS if cv < below), Band.POOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """A GPU's averages over the window: ratio, bytes, watts. None where no sample had the value.

    `work` is the share of time in which a simulated GPU's ranks worked rather than waited; real GPUs do not report it.
    """

    utilization: float | None
    memory: float | None
    power: float | None
    work: float | None = None

    def of(self, quantity: Quantity) -> float | None:
        """Return the average of one quantity."""
        match quantity:
            case Quantity.UTILIZATION:
                return self.utilization
            case Quantity.MEMORY:
                return self.memory
            case Quantity.POWER:
                return self.power


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A GPU's load at one moment: Unix time by its node's clock, and the age in seconds when it was reported.

    Other machines use the age, because the clocks of nodes differ.
    """

    timestamp: float
    age_seconds: float
    load: GpuLoad


def load_of(sample: Sample, *, simulated: bool = False) -> GpuLoad:
    """Return the values of a sample that a balance uses; the GPU may be `simulated`."""
    memory = None if sample.memory_used_bytes is None else float(sample.memory_used_bytes)
    work = sample.memory_activity if simulated else None
    return GpuLoad(utilization=sample.utilization, memory=memory, power=sample.power_watts, work=work)


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


def balance(loads: Mapping[str, GpuLoad | None]) -> Balance:
    """Return a job's balance from its GPUs' loads by UUID; None for a GPU without a sample in the window."""
    present = [load for load in loads.values() if load is not None]
    busy = _values(present, Quantity.UTILIZATION)
    working = bool(busy) and statistics.fmean(busy) > IDLE_UTILIZATION
    spreads = (_spread(quantity, _values(present, quantity)) for quantity in Quantity) if working else ()
    return Balance(
        gpus=len(loads),
        silent=tuple(uuid for uuid, load in loads.items() if load is None),
        spreads=tuple(spread for spread in spreads if spread is not None),
    )


def _values(loads: Iterable[GpuLoad], quantity: Quantity) -> list[float]:
    return [value for load in loads if (value := load.of(quantity)) is not None]


def _spread(quantity: Quantity, values: Sequence[float]) -> Spread | None:
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    if mean <= 0.0:
        return None
    median = statistics.median(values)
    return Spread(
        quantity=quantity,
        cv=statistics.pstdev(values, mean) / mean,
        min_per_median=min(values) / median if median > 0.0 else None,
        mean=mean,
    )


class LoadWindow:
    """Averages each GPU's newest samples over a sliding window, as PromQL's `avg_over_time` does."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        """Average over the last `seconds`."""
        self._seconds = seconds
        self._rows: dict[str, deque[tuple[float, GpuLoad]]] = {}

    def add(self, sample: Sample) -> None:
        """Add a sample; samples of a GPU come in the order of their monotonic time."""
        self.add_load(sample.gpu_uuid, sample.monotonic, load_of(sample))

    def add_load(self, gpu_uuid: str, at: float, load: GpuLoad) -> None:
        """Add a GPU's load at monotonic time `at`, for callers without a sample."""
        rows = self._rows.setdefault(gpu_uuid, deque())
        rows.append((at, load))
        self._expire(rows, at)

    def add_points(self, gpu_uuid: str, points: Iterable[LoadPoint], now: float) -> None:
        """Add a GPU's last loads, oldest first, as another machine reported them; received at monotonic time `now`.

        A late report seems younger than it is; it is never placed before a load that was added earlier.
        """
        for point in points:
            rows = self._rows.get(gpu_uuid)
            at = max(now - point.age_seconds, rows[-1][0] if rows else -math.inf)
            self.add_load(gpu_uuid, at, point.load)

    def _expire(self, rows: deque[tuple[float, GpuLoad]], now: float) -> None:
        while rows and rows[0][0] <= now - self._seconds:
            rows.popleft()

    def load(self, gpu_uuid: str, now: float, since: float = -math.inf) -> GpuLoad | None:
        """Return the GPU's averages at monotonic time `now` over samples after `since`; None without any."""
        rows = self._rows.get(gpu_uuid)
        if rows is None:
            return None
        self._expire(rows, now)
        if not rows:
            del self._rows[gpu_uuid]
            return None
        loads = [load for at, load in rows if at >= since]
        if not loads:
            return None
        return GpuLoad(
            utilization=_mean(load.utilization for load in loads),
            memory=_mean(load.memory for load in loads),
            power=_mean(load.power for load in loads),
            work=_mean(load.work for load in loads),
        )

    def balance(self, gpu_uuids: Iterable[str], now: float, since: float = -math.inf) -> Balance:
        """Return the balance of a job that holds these GPUs and began to run at monotonic time `since`."""
        return balance({uuid: self.load(uuid, now, since) for uuid in gpu_uuids})


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
