"""Compares two recordings: means, peaks, energy, and their differences.

Means are over time, not over samples, so that two recordings of different rates compare. It reports differences, not
whether they could be chance, which one run each cannot show.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.gpu.recording.recording import RecordedSample, Recording

_LONGEST_GAP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One quantity in both recordings; None where a recording does not have it."""

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """The second value over the first; None where either is missing or the first is 0."""
        return self.second / self.first if self.first and self.second is not None else None


def compare(first: Recording, second: Recording) -> tuple[Difference, ...]:
    """Compare duration, then mean and peak of each quantity over all GPUs (memory and power summed over them), then energy."""
    rows = [Difference(name="duration", unit="s", first=first.duration_seconds, second=second.duration_seconds)]
    for name, unit, value, summed in (
        ("utilization", "%", _utilization, False),
        ("memory", "MiB", _memory, True),
        ("power", "W", lambda sample: sample.power_watts, True),
        ("temperature", "C", lambda sample: sample.temperature_celsius, False),
    ):
        for kind, over in (("mean", _mean), ("peak", _peak)):
            one, other = (_over_gpus(recording, value, over, summed=summed) for recording in (first, second))
            rows.append(Difference(name=f"{kind} {name}", unit=unit, first=one, second=other))
    rows.append(Difference(name="energy", unit="J", first=_energy(first), second=_energy(second)))
    return tuple(rows)


def _utilization(sample: RecordedSample) -> float | None:
    return None if sample.utilization is None else 100 * sample.utilization


def _memory(sample: RecordedSample) -> float | None:
    return None if sample.memory_used_bytes is None else sample.memory_used_bytes / (1 << 20)


def _over_gpus(
    recording: Recording,
    value: Callable[[RecordedSample], float | None],
    over: Callable[[Sequence[tuple[float, float]]], float | None],
    *,
    summed: bool,
) -> float | None:
    """Return each GPU's figure, added up or (not `summed`) averaged over the GPUs that have one."""
    figures: list[float] = []
    for samples in recording.by_gpu.values():
        points = [(sample.timestamp, found) for sample in samples if (found := value(sample)) is not None]
        figure = over(points)
        if figure is not None:
            figures.append(figure)
    if not figures:
        return None
    return sum(figures) if summed else sum(figures) / len(figures)


def _mean(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean over time by the trapezoid rule; for a single point, its value."""
    if len(points) < 2:
        return points[0][1] if points else None
    spans = [
        (later[0] - earlier[0], (later[1] + earlier[1]) / 2)
        for earlier, later in itertools.pairwise(points)
        if later[0] - earlier[0] <= _LONGEST_GAP_SECONDS
    ]
    total = sum(span for span, _ in spans)
    if total <= 0:
        return sum(value for _, value in points) / len(points)
    return sum(span * value for span, value in spans) / total


def _peak(points: Sequence[tuple[float, float]]) -> float | None:
    return max((value for _, value in points), default=None)


def _energy(recording: Recording) -> float | None:
    """Return the energy by the counters where all GPUs have one, else the integral of power; None without either."""
    counted: list[float] = []
    for samples in recording.by_gpu.values():
        readings = [sample.energy_joules for sample in samples if sample.energy_joules is not None]
        if len(readings) < 2 or readings[-1] < readings[0]:
            break
        counted.append(readings[-1] - readings[0])
    else:
        return sum(counted) if counted else None
    joules = 0.0
    for samples in recording.by_gpu.values():
        points = [(sample.timestamp, sample.power_watts) for sample in samples if sample.power_watts is not None]
        joules += sum(
            (later[0] - earlier[0]) * (later[1] + earlier[1]) / 2
            for earlier, later in itertools.pairwise(points)
            if later[0] - earlier[0] <= _LONGEST_GAP_SECONDS
        )
    return joules or None


def comparison_text(first: Recording, second: Recording) -> str:
    """Return the comparison as a table of plain text, with `first` as run 1."""
    lines = [f"{'':<18}{'Run 1':>12}{'Run 2':>12}{'Diff':>10}"]
    for row in compare(first, second):
        change = "" if row.ratio is None else f"{100 * (row.ratio - 1):+.1f}%"
        cells = ("-" if value is None else f"{value:.1f}" for value in (row.first, row.second))
        lines.append(
            f"{f'{row.name} ({row.unit})':<22.22}" + "".join(f"{cell:>12}" for cell in cells) + f"{change:>10}"
        )
    lines += [f"Run 1: {first.source}", f"Run 2: {second.source}"]
    return "\n".join(lines)
