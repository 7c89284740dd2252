"""Quality of a recording: how often and how precisely GPUs were sampled, how often values were new, and the energy by two methods.

Everything is kept in a bounded amount of memory however long the recording runs; quantiles come from a histogram whose
buckets are 5 % wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from orchestrator.gpu.sample import GpuInfo, Sample
    from orchestrator.gpu.sampler import Reading

_FINEST_SECONDS: Final = 1e-6
_STEP: Final = math.log(1.05)
_GAP_SECONDS: Final = 5.0
"""Power is not integrated across a longer gap, in which its values are unknown."""


class Quantiles:
    """Quantiles of times (seconds), to 5 %."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        """Add a time; one below a microsecond counts as zero."""
        bucket = 0 if seconds < _FINEST_SECONDS else 1 + int(math.log(seconds / _FINEST_SECONDS) / _STEP)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.maximum = max(self.maximum, seconds)

    def quantile(self, share: float) -> float:
        """Return the time that `share` of the times do not exceed; 0 when there are none."""
        left = share * self.count
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                upper = 0.0 if bucket == 0 else _FINEST_SECONDS * math.exp(bucket * _STEP)
                return min(upper, self.maximum)
        return self.maximum


@dataclass(slots=True)
class Range:
    """Smallest, largest and mean of a value."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float | None) -> None:
        """Add a value; None is left out."""
        if value is not None:
            self.count += 1
            self.total += value
            self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def mean(self) -> float:
        """Return the mean; only valid when `count` is not 0."""
        return self.total / self.count


@dataclass(slots=True)
class GpuStats:
    """Statistics of one GPU."""

    info: GpuInfo
    samples: int = 0
    fresh: int = 0
    first: float | None = None
    last: float | None = None
    integral_joules: float = 0.0
    ranges: dict[str, Range] = field(default_factory=dict)
    _previous: tuple[float, float] | None = None
    _counter: list[tuple[float, float]] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Add a sample."""
        self.samples += 1
        self.fresh += sample.fresh
        self.first = sample.monotonic if self.first is None else self.first
        self.last = sample.monotonic
        self._integrate(sample)
        self._range("Utilization", "%", None if sample.utilization is None else 100 * sample.utilization)
        used = sample.memory_used_bytes
        self._range("Memory", "MiB", None if used is None else used / (1 << 20))
        for sensor, celsius in sample.temperatures:
            self._range(f"Temperature {sensor}", "C", celsius)
        self._range("Power", "W", sample.power_watts)

    def _range(self, name: str, unit: str, value: float | None) -> None:
        if value is not None:
            key = f"{name} ({unit})"
            known = self.ranges.get(key)
            if known is None:
                known = self.ranges[key] = Range()
            known.add(value)

    def _integrate(self, sample: Sample) -> None:
        if sample.power_watts is not None:
            now = (sample.monotonic, sample.power_watts)
            if self._previous is not None and now[0] - self._previous[0] <= _GAP_SECONDS:
                self.integral_joules += (now[0] - self._previous[0]) * (now[1] + self._previous[1]) / 2
            self._previous = now
        if sample.energy_joules is not None:
            pair = (sample.energy_joules, self.integral_joules)
            self._counter = [self._counter[0] if self._counter else pair, pair]

    @property
    def counter_joules(self) -> float | None:
        """Energy by the hardware's counter, between its first and its last reading."""
        return self._counter[1][0] - self._counter[0][0] if self._counter else None

    @property
    def integral_joules_beside_counter(self) -> float | None:
        """Return the integral of power between the same two moments, to compare with the counter."""
        return self._counter[1][1] - self._counter[0][1] if self._counter else None

    @property
    def seconds(self) -> float:
        """Seconds from the first sample to the last."""
        return 0.0 if self.first is None or self.last is None else self.last - self.first

    @property
    def rate(self) -> float:
        """Samples a second; 0 for fewer than two."""
        return (self.samples - 1) / self.seconds if self.seconds > 0 else 0.0

    @property
    def fresh_rate(self) -> float:
        """Return new values of the power sensor per second."""
        # The first sample is new by definition, and begins the span that the others fill.
        return max(0, self.fresh - 1) / self.seconds if self.seconds > 0 else 0.0


class RecordStats:
    """Statistics of a recording over all its GPUs."""

    def __init__(self, infos: tuple[GpuInfo, ...], wanted_rate: float) -> None:
        """Start the statistics of these GPUs, which are sampled at `wanted_rate` hertz."""
        self.wanted_rate = wanted_rate
        self.gpus = {info.uuid: GpuStats(info) for info in infos}
        self.lateness = Quantiles()
        self.missed = 0

    def add(self, reading: Reading) -> None:
        """Add a reading."""
        self.lateness.add(max(0.0, reading.lateness))
        self.gpus[reading.sample.gpu_uuid].add(reading.sample)

    def as_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values; times in seconds, rates in hertz, energy in joules."""
        return {
            "wanted_rate_hz": self.wanted_rate,
            "missed_ticks": self.missed,
            "jitter_seconds": {
                "p50": self.lateness.quantile(0.5),
                "p99": self.lateness.quantile(0.99),
                "max": self.lateness.maximum,
            },
            "gpus": [
                {
                    "gpu_uuid": gpu.info.uuid,
                    "gpu_index": gpu.info.index,
                    "samples": gpu.samples,
                    "achieved_rate_hz": gpu.rate,
                    "distinct_value_rate_hz": gpu.fresh_rate,
                    "energy_counter_joules": gpu.counter_joules,
                    "energy_integral_joules": gpu.integral_joules_beside_counter,
                }
                for gpu in self.gpus.values()
            ],
        }

    def text(self) -> str:
        """Return the statistics as text."""
        jitter = self.lateness
        lines = [
            (
                f"requested {self.wanted_rate:g} Hz; jitter p50 {jitter.quantile(0.5) * 1e3:.2f} ms,"
                f" p99 {jitter.quantile(0.99) * 1e3:.2f} ms, max {jitter.maximum * 1e3:.2f} ms;"
                f" {self.missed} ticks missed"
            )
        ]
        for gpu in self.gpus.values():
            line = f"GPU {gpu.info.index}: {gpu.rate:.2f} samples/s, {gpu.fresh_rate:.2f} new power values/s"
            counted, integral = gpu.counter_joules, gpu.integral_joules_beside_counter
            if counted is not None and integral is not None:
                line += f", energy {counted:.1f} J by the counter, {integral:.1f} J by integrating power"
            elif gpu.integral_joules > 0:
                line += f", energy {gpu.integral_joules:.1f} J by integrating power (no counter)"
            lines.append(line)
        return "\n".join(lines)
