"""The style of every chart: colours for colour-blind readers, axes of time, lines thinned to the screen's resolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.measure.statistics import longest_gap
from orchestrator.parts import install_line

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.analysis.reading.series import Floats

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's colours, which also differ in lightness; further lines differ by their dashes."""
DASHES: Final = ("-", "--", ":", "-.")
GREY: Final = "#666666"
BAND_COLOURS: Final = {"excellent": "#56B4E9", "good": "#009E73", "fair": "#E69F00", "poor": "#D55E00"}
HATCHES: Final = {"excellent": "", "good": "", "fair": "//", "poor": "xx"}
DPI: Final = 100
MOST_POINTS: Final = 1500
MOST_LINES: Final = 8
"""More GPUs than this are drawn as a range with the median in it: more lines cannot be told apart."""


class PlotError(Exception):
    """There is nothing to draw, or no library to draw with; the message says which and what to do."""


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches. Raises PlotError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"pictures need matplotlib: {install_line('plots')}") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, target: Path) -> Path:
    """Write the figure as a PNG file. Raises OSError when that is not possible."""
    figure.savefig(target, format="png", dpi=DPI)
    return target


def colour(place: int) -> str:
    """Return the colour of the line at a position."""
    return COLOURS[place % len(COLOURS)]


def dash(place: int) -> str:
    """Return the dashes of the line at a position: colours repeat after eight."""
    return DASHES[place // len(COLOURS) % len(DASHES)]


def finish(axis: Any, *, y: str, x: str = "", title: str = "", from_zero: bool = True) -> None:
    """Set labels, a faint grid, and a vertical axis that begins at zero."""
    axis.set_ylabel(y)
    if x:
        axis.set_xlabel(x)
    if title:
        axis.set_title(title, fontsize="medium", loc="left")
    axis.grid(visible=True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if from_zero:
        _, top = axis.get_ylim()
        # The automatic margin is a part of the values' range: a line of nearly equal values would be on the edge.
        top = max(top, 1.05 * axis.dataLim.y1) if axis.lines and axis.get_autoscaley_on() else top
        axis.set_ylim(0, top if top > 0 else 1)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Time since ``start`` (Unix time), in the unit that suits the length of the run."""

    start: float
    unit: str
    seconds: float

    def of(self, times: Floats) -> Floats:
        """Return places on the axis."""
        return (times - self.start) / self.seconds

    @property
    def label(self) -> str:
        """The axis's label."""
        return f"time since the start ({self.unit})"


def time_axis(start: float, seconds: float) -> TimeAxis:
    """Return an axis in seconds for some minutes, in minutes for some hours, else in hours."""
    if seconds < 300:
        return TimeAxis(start, "s", 1.0)
    return TimeAxis(start, "min", 60.0) if seconds < 4 * 3600 else TimeAxis(start, "h", 3600.0)


def thinned(times: Floats, values: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return the visible points of a line: the lowest and the highest of each few values, with a break where values are missing."""
    there = np.isfinite(values)
    times, values = times[there], values[there]
    gap = longest_gap(times)
    if len(times) > most:
        size = -(-2 * len(times) // most)
        kept = len(times) // size * size
        blocks = values[:kept].reshape(-1, size)
        low, high = blocks.argmin(axis=1), blocks.argmax(axis=1)
        places = np.sort(np.stack((low, high), axis=1), axis=1) + np.arange(len(blocks))[:, None] * size
        chosen = np.unique(np.append(places.ravel(), len(times) - 1))
        times, values = times[chosen], values[chosen]
        gap = max(gap, 2.5 * size * gap / 4)
    breaks = np.flatnonzero(np.diff(times) > gap) + 1
    return np.insert(times, breaks, np.nan), np.insert(values, breaks, np.nan)


def grid_of(count: int) -> tuple[int, int]:
    """Return rows and columns for this many panels: 1x2, 2x2, 2x3, 2x4, then nearly square."""
    small = {1: (1, 1), 2: (1, 2), 3: (2, 2), 4: (2, 2), 5: (2, 3), 6: (2, 3), 7: (2, 4), 8: (2, 4)}
    if count in small:
        return small[count]
    columns = int(np.ceil(np.sqrt(count)))
    return -(-count // columns), columns
