"""The graphs of a recording, `..._plot.png`: every GPU's load, memory, power and temperature over time, one panel each.

Works on any recording that was read back. matplotlib is imported only here, and only for a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.parts import install_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.gpu.recording.recording import RecordedSample, Recording

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
