"""A run's data, from any file format: columns of numbers by GPU, and the training's reports beside them.

Base units; an unmeasured value is NaN, never 0. Times are Unix time, in rising order.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Floats = NDArray[np.float64]


class Quantity(enum.StrEnum):
    """A measured quantity of a GPU over time."""

    UTILIZATION = "utilization"
    MEMORY = "memory"
    POWER = "power"
    TEMPERATURE = "temperature"
    CLOCK = "clock"
    FAN = "fan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The display of a quantity: its name, its unit, and the factor from base units to that unit."""

    name: str
    unit: str
    factor: float


SHOWN: Final = {
    Quantity.UTILIZATION: Shown(name="utilization", unit="%", factor=100.0),
    Quantity.MEMORY: Shown(name="memory", unit="MiB", factor=1.0 / 2**20),
    Quantity.POWER: Shown(name="power", unit="W", factor=1.0),
    Quantity.TEMPERATURE: Shown(name="temperature", unit="°C", factor=1.0),
    Quantity.CLOCK: Shown(name="SM clock", unit="MHz", factor=1e-6),
    Quantity.FAN: Shown(name="fan", unit="%", factor=100.0),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuSeries:
    """One GPU: ``values`` and ``energy_joules`` (the hardware's counter) have one entry for each of ``times``.

    ``label`` distinguishes it from the run's other GPUs: GPU 3, with a prefix of its UUID where two nodes have a GPU 3.
    """

    label: str
    index: int
    model: str = ""
    uuid: str = ""
    vendor: str = ""
    times: Floats
    values: Mapping[Quantity, Floats]
    energy_joules: Floats
    memory_total_bytes: float | None = None
    power_limit_watts: float | None = None
    temperature_limit_celsius: float | None = None
    throttled: int = 0

    def shown(self, quantity: Quantity) -> Floats:
        """Return the values of a quantity in its display unit; all NaN where it was not measured."""
        found = self.values.get(quantity)
        return np.full(len(self.times), np.nan) if found is None else found * SHOWN[quantity].factor

    def has(self, quantity: Quantity) -> bool:
        """Whether the quantity has any value."""
        found = self.values.get(quantity)
        return found is not None and bool(np.isfinite(found).any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Progress:
    """The training's reports, one entry for each of ``times``: totals so far, the mean step time, its metrics."""

    times: Floats
    attempts: Floats
    steps: Floats
    samples: Floats
    tokens: Floats
    step_seconds: Floats
    epochs: Floats
    phases: tuple[str, ...]
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    total_steps: int | None = None

    def best(self, *names: str) -> tuple[str, float] | None:
        """Return the name and the largest value of the first of these metrics that was reported."""
        for name in names:
            values = self.metrics.get(name)
            if values is not None and np.isfinite(values).any():
                return name, float(np.nanmax(values))
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A job or a recording: its GPUs and its progress.

    ``dropped`` counts invalid entries; ``repaired`` says that a truncated end of a file was left out.
    """

    name: str
    sources: tuple[Path, ...]
    gpus: tuple[GpuSeries, ...]
    progress: Progress | None = None
    dropped: int = 0
    repaired: bool = False

    @property
    def start(self) -> float | None:
        """Unix time of the first sample of any GPU, or of the first report where no GPU was sampled."""
        return min((float(times[0]) for times in self._times()), default=None)

    @property
    def end(self) -> float | None:
        """Unix time of the last sample or report."""
        return max((float(times[-1]) for times in self._times()), default=None)

    @property
    def seconds(self) -> float:
        """Return the time from the first sample to the last: by their times, not by their number."""
        return 0.0 if self.start is None or self.end is None else self.end - self.start

    def _times(self) -> list[Floats]:
        sampled = [gpu.times for gpu in self.gpus if len(gpu.times)]
        if not sampled and self.progress is not None and len(self.progress.times):
            return [self.progress.times]
        return sampled

    @property
    def samples(self) -> int:
        """Number of readings of all GPUs."""
        return sum(len(gpu.times) for gpu in self.gpus)
