"""A recording as read back, from any format: rows in base units, grouped by GPU.

Reports, comparisons and plots use only this form. An absent value is None here as well.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """One GPU at one moment. `timestamp` is Unix time; `elapsed_seconds` counts from the recording's first row.

    `training` are the run's labels at that time (epoch, batch, phase), if any.
    """

    timestamp: float
    elapsed_seconds: float
    gpu_index: int
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    vendor: str | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None
    temperatures: tuple[tuple[str, float], ...] = ()
    temperature_limits: tuple[tuple[str, str, float], ...] = ()
    clocks: tuple[tuple[str, float], ...] = ()
    fan: float | None = None
    throttle: tuple[str, ...] = ()
    fresh: bool | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A file, or a job's telemetry, read back.

    `dropped` counts invalid entries; `repaired` says that the end was truncated and left out.
    """

    source: Path
    samples: tuple[RecordedSample, ...]
    dropped: int = 0
    repaired: bool = False

    @property
    def by_gpu(self) -> dict[int, tuple[RecordedSample, ...]]:
        """Return the samples of each GPU, by its index, in the order of time."""
        groups: dict[int, list[RecordedSample]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.gpu_index].append(sample)
        return {index: tuple(groups[index]) for index in sorted(groups)}

    @property
    def duration_seconds(self) -> float:
        """Return the time from the first sample to the last: by their times, not by their number."""
        times = [sample.timestamp for sample in self.samples]
        return max(times) - min(times) if times else 0.0
