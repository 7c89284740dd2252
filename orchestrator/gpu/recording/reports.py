"""What is told of a recording: the summary beside it, the graphs of it, and its comparison with another one."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.recording.rows import VENDOR_NAMES
from orchestrator.parts import install_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orchestrator.gpu.recording.reading import RecordedSample, Recording
    from orchestrator.gpu.recording.recorder import RecordStats


def summary(stats: RecordStats, started: dt.datetime) -> str:
    """Return the summary of a recording that began at `started` (local time): average, largest and smallest values per GPU.

    The duration is that between the first and the last sample, not the number of samples; readings of 0 W are
    left out.
    """
    lines = ["GPU Performance Summary", "=" * 23, ""]
    for gpu in stats.gpus.values():
        end = started + dt.timedelta(seconds=gpu.seconds)
        lines += [
            f"GPU: {gpu.info.model} (index {gpu.info.index}, {gpu.info.uuid})",
            f"Type: {VENDOR_NAMES[gpu.info.vendor]}",
            f"Duration: {gpu.seconds:.1f} s",
            f"Start: {started.isoformat(timespec='seconds')}",
            f"End: {end.isoformat(timespec='seconds')}",
        ]
        for name, values in gpu.ranges.items():
            lines.append(f"{name}: average {values.mean:.1f}, max {values.high:.1f}, min {values.low:.1f}")
        if not gpu.ranges:
            lines.append("no values: this GPU did not answer")
        lines.append("")
    return "\n".join([*lines, "Recording", "-" * 9, stats.text(), ""])


def write_summary(stats: RecordStats, recording: Path, started: dt.datetime) -> Path:
    """Write the summary beside the file `recording`; returns its path. Raises OSError when it cannot be written."""
    path = recording.with_name(f"{recording.stem}_summary.txt")
    path.write_text(summary(stats, started), encoding="utf-8")
    return path


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


GIB: Final = 2**30
MAX_POINTS: Final = 4000
"""Most points of a line: more than a screen has columns. An hour at 100 Hz is 360,000 samples."""

_PANELS: Final[tuple[tuple[str, Callable[[RecordedSample], float | None]], ...]] = (
    ("utilization (%)", lambda s: None if s.utilization is None else s.utilization * 100),
    ("memory (GiB)", lambda s: None if s.memory_used_bytes is None else s.memory_used_bytes / GIB),
    ("power (W)", lambda s: s.power_watts),
    ("temperature (°C)", lambda s: s.temperature_celsius),
)


class PlotError(Exception):
    """There is nothing to draw, or no library to draw with; the message says which and what to do."""


def write_plot(recording: Recording, target: Path) -> Path:
    """Draw `recording` into the PNG file `target`, and return it.

    Panels of values that were not recorded are left out. Raises PlotError, and OSError when the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"graphs need matplotlib: {install_line('plots')}") from error
    panels = [(label, lines) for label, value in _PANELS if (lines := _lines(recording, value))]
    if not panels:
        raise PlotError(f"{recording.source} holds no values to draw")
    figure = Figure(figsize=(10, 1 + 2.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, lines) in zip(axes, panels, strict=True):
        for index, (seconds, values) in lines.items():
            axis.plot(seconds, values, linewidth=0.9, label=f"GPU {index}")
        axis.set_ylabel(label)
        top = max(max(values) for _, values in lines.values()) or 1.0
        axis.set_ylim(-0.03 * top, 1.08 * top)  # lines at zero and at the top are seen, too
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper right", ncols=8, fontsize="small")
    axes[-1].set_xlabel("seconds since the start")
    figure.suptitle(recording.source.name)
    figure.savefig(target, format="png", dpi=110)
    return target


def _lines(
    recording: Recording, value: Callable[[RecordedSample], float | None]
) -> dict[int, tuple[list[float], list[float]]]:
    """Return seconds and values of each GPU that has any, thinned to the visible resolution."""
    lines = {}
    for index, samples in recording.by_gpu.items():
        points = [(s.elapsed_seconds, found) for s in samples if (found := value(s)) is not None]
        if points:
            kept = points[:: -(-len(points) // MAX_POINTS)]
            lines[index] = ([at for at, _ in kept], [found for _, found in kept])
    return lines
