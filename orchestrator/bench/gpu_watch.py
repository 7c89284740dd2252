"""Measures the ranks' GPUs during a run: mean utilization and power, and energy by their own counters."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final, Self

from orchestrator.gpu.sample import Detail, GpuReadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.gpu.sample import GpuReader, Sample

EVERY_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Use of all watched GPUs together, including warm-up and controls; None where they do not report a value."""

    utilization: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None


class GpuWatch:
    """Reads GPUs in a thread of its own while a run is made. Without GPUs it does nothing."""

    def __init__(self, readers: Sequence[GpuReader], every_seconds: float = EVERY_SECONDS) -> None:
        self._readers = readers
        self._every_seconds = every_seconds
        self._samples: list[list[Sample]] = [[] for _ in readers]
        self._energy: list[list[float]] = [[] for _ in readers]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        self._read(Detail.FULL)
        if self._readers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._readers:
            self._thread.join()
        self._read(Detail.FULL)

    def _follow(self) -> None:
        while not self._over.wait(self._every_seconds):
            self._read(Detail.LOAD)

    def _read(self, detail: Detail) -> None:
        for reader, samples, energy in zip(self._readers, self._samples, self._energy, strict=True):
            try:
                sample = reader.read(detail)
            except GpuReadError:
                continue  # one reading less for this GPU
            samples.append(sample)
            if sample.energy_joules is not None:
                energy.append(sample.energy_joules)

    def use(self) -> GpuUse:
        """Return the figures; call it after the end of the watch."""
        loads = [_mean([s.utilization for s in samples]) for samples in self._samples]
        powers = [_mean([s.power_watts for s in samples]) for samples in self._samples]
        joules = [one[-1] - one[0] if len(one) > 1 else None for one in self._energy]
        return GpuUse(utilization=_mean(loads), power_watts=_sum(powers), energy_joules=_sum(joules))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
