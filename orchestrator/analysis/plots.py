"""Charts of one run's GPUs, of runs side by side, and of runs along a common axis. matplotlib is imported only when a chart is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.alignment import LOSSES, Align, aligned, loss, metric_line
from orchestrator.analysis.comparison import LETTERS, lines_of
from orchestrator.analysis.run_summary import ACCURACIES
from orchestrator.analysis.runs import SHOWN, GpuSeries, Quantity
from orchestrator.analysis.statistics import bin_means, longest_gap, mean_over_time, summarize
from orchestrator.gpu.load import BANDS, Band, band, coefficient_of_variation
from orchestrator.parts import install_line
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from orchestrator.analysis.alignment import Line, Measure
    from orchestrator.analysis.run_summary import Windows
    from orchestrator.analysis.runs import Floats, Run
    from orchestrator.analysis.statistics import Summary

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's colours, which also differ in lightness; further lines differ by their dashes."""
DASHES: Final = ("-", "--", ":", "-.")
GREY: Final = "#666666"
BAND_COLOURS: Final = {"excellent": "#56B4E9", "good": "#009E73", "fair": "#E69F00", "poor": "#D55E00"}
HATCHES: Final = {"excellent": "", "good": "", "fair": "//", "poor": "xx"}
DPI: Final = 100
MAX_POINTS: Final = 1500
MAX_LINES: Final = 8
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


def thinned(times: Floats, values: Floats, most: int = MAX_POINTS) -> tuple[Floats, Floats]:
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


OVERVIEW: Final = (Quantity.UTILIZATION, Quantity.MEMORY, Quantity.POWER, Quantity.TEMPERATURE, Quantity.CLOCK)
MAX_BARS_WITH_NUMBERS: Final = 16
MAX_PANELS_WITH_LABELS: Final = 16


def write_overview(run: Run, target: Path) -> Path:
    """Draw utilization, memory, power, temperature and clock over time, a panel each, with the known limits."""
    shown = [quantity for quantity in OVERVIEW if any(gpu.has(quantity) for gpu in run.gpus)]
    if not shown or run.start is None:
        raise PlotError(f"{run.name} holds no values of GPUs to draw")
    figure = new_figure(11, 1.2 + 2.3 * len(shown))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    axis = time_axis(run.start, run.seconds)
    for panel, quantity in zip(axes, shown, strict=True):
        draw_lines(panel, run.gpus, quantity, axis)
        _limits(panel, run.gpus, quantity)
        finish(panel, y=f"{SHOWN[quantity].name} ({SHOWN[quantity].unit})")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=min(8, len(labels)), fontsize="small", frameon=False
    )
    axes[-1].set_xlabel(axis.label)
    figure.suptitle(run.name, x=0.01, ha="left", fontsize="large")
    return save(figure, target)


def draw_lines(axis: Any, gpus: Sequence[GpuSeries], quantity: Quantity, time: TimeAxis) -> None:
    """Draw a line for each GPU or, for many, the range between them with the median and the two that differ most."""
    having = [gpu for gpu in gpus if gpu.has(quantity)]
    if len(having) > MAX_LINES:
        _range(axis, having, quantity, time)
        return
    for place, gpu in enumerate(having):
        times, values = thinned(gpu.times, gpu.shown(quantity))
        axis.plot(time.of(times), values, linewidth=1.1, color=colour(place), linestyle=dash(place), label=gpu.label)


def _range(axis: Any, gpus: Sequence[GpuSeries], quantity: Quantity, time: TimeAxis) -> None:
    start, end = min(gpu.times[0] for gpu in gpus), max(gpu.times[-1] for gpu in gpus)
    count = max(2, min(400, min(len(gpu.times) for gpu in gpus) // 2))
    edges = np.linspace(start, end, count + 1)
    table = np.array([bin_means(gpu.times, gpu.shown(quantity), edges) for gpu in gpus])
    filled = np.isfinite(table).any(axis=0)
    middles = time.of((edges[1:] + edges[:-1]) / 2)[filled]
    table = table[:, filled]
    axis.fill_between(
        middles,
        np.nanmin(table, axis=0),
        np.nanmax(table, axis=0),
        color=COLOURS[5],
        alpha=0.35,
        linewidth=0,
        label=f"lowest to highest of {len(gpus)} GPUs",
    )
    axis.plot(middles, np.nanmedian(table, axis=0), color=COLOURS[0], linewidth=1.3, label="median GPU")
    means = np.nanmean(table, axis=1)
    lowest, highest = int(means.argmin()), int(means.argmax())
    axis.plot(middles, table[lowest], color=COLOURS[1], linewidth=0.9, linestyle="--", label="GPU of the lowest mean")
    axis.plot(middles, table[highest], color=COLOURS[6], linewidth=0.9, linestyle=":", label="GPU of the highest mean")
    title = f"lowest mean: {gpus[lowest].label}, highest: {gpus[highest].label}"
    axis.set_title(title, fontsize="small", loc="right", color=GREY)


def _limits(axis: Any, gpus: Sequence[GpuSeries], quantity: Quantity) -> None:
    """Draw the limit of power, memory or temperature, where the files have it; only as text where it would flatten the lines."""
    limit, name = {
        Quantity.POWER: (max((gpu.power_limit_watts or 0.0 for gpu in gpus), default=0.0), "power limit"),
        Quantity.TEMPERATURE: (max((gpu.temperature_limit_celsius or 0.0 for gpu in gpus), default=0.0), "limit"),
        Quantity.MEMORY: (max((gpu.memory_total_bytes or 0.0 for gpu in gpus), default=0.0) / 2**20, "installed"),
        Quantity.UTILIZATION: (100.0, ""),
    }.get(quantity, (0.0, ""))
    _, top = axis.get_ylim()
    if quantity is Quantity.UTILIZATION:
        axis.set_ylim(0, 105)
    elif limit > 0.0 and limit <= 5 * top:
        axis.axhline(limit, color=GREY, linestyle=(0, (6, 3)), linewidth=1.0)
        axis.set_ylim(0, 1.12 * max(limit, top))
        axis.text(
            0.005,
            limit,
            f"{name} {limit:,.0f} {SHOWN[quantity].unit}",
            fontsize="small",
            color=GREY,
            va="bottom",
            transform=axis.get_yaxis_transform(),
        )
    elif limit > 0.0:
        axis.set_ylim(0, 1.15 * top)
        axis.text(
            0.005,
            0.97,
            f"{name}: {limit:,.0f} {SHOWN[quantity].unit}, far above",
            fontsize="small",
            color=GREY,
            va="top",
            transform=axis.transAxes,
        )


def write_memory_breakdown(run: Run, target: Path) -> Path:
    """Draw the memory of each GPU over time, in a grid with one scale; 64 GPUs have smaller panels."""
    gpus = [gpu for gpu in run.gpus if gpu.has(Quantity.MEMORY)]
    if not gpus or run.start is None:
        raise PlotError(f"{run.name} holds no memory of GPUs")
    rows, columns = grid_of(len(gpus))
    large = len(gpus) <= MAX_PANELS_WITH_LABELS
    size = (4.2, 2.6) if large else (1.7, 1.35)
    figure = new_figure(max(6.0, size[0] * columns), 1.0 + size[1] * rows)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axis = time_axis(run.start, run.seconds)
    top = max(float(np.nanmax(gpu.shown(Quantity.MEMORY))) for gpu in gpus)
    for panel in axes.flat[len(gpus) :]:
        panel.set_visible(False)
    for panel, gpu in zip(axes.flat, gpus, strict=False):
        values = gpu.shown(Quantity.MEMORY)
        times, line = thinned(gpu.times, values, 600)
        mean = mean_over_time(gpu.times, values) or 0.0
        panel.fill_between(axis.of(times), 0, line, color=COLOURS[0], alpha=0.2, linewidth=0)
        panel.plot(axis.of(times), line, color=COLOURS[0], linewidth=1.2)
        panel.axhline(mean, color=COLOURS[1], linestyle="--", linewidth=1.0)
        spread = float(np.nanstd(values))
        panel.set_title(
            f"{gpu.label}: mean {mean:,.0f} ± {spread:,.0f} MiB" if large else f"{gpu.label}: {mean:,.0f}",
            fontsize="small" if large else "x-small",
            loc="left",
        )
        finish(panel, y="", from_zero=False)
        panel.set_ylim(0, 1.08 * top or 1)
        panel.tick_params(labelsize="small" if large else "xx-small")
    figure.supxlabel(axis.label, fontsize="medium")
    figure.supylabel("memory in use (MiB)", fontsize="medium")
    figure.suptitle(f"{run.name}: memory of each GPU (dashed: its mean)", x=0.01, ha="left", fontsize="large")
    return save(figure, target)


def write_load_balance(run: Run, windows: Windows, target: Path) -> Path:
    """Draw, left, each GPU's average use; right, the CV over time within its bands."""
    gpus = [gpu for gpu in run.gpus if len(gpu.times)]
    if len(gpus) < 2 or run.start is None:
        raise PlotError(f"{run.name} has one GPU: there is no balance")
    figure = new_figure(13, 7.5)
    panels = figure.subplots(3, 2, width_ratios=(1.0, 1.25), squeeze=False)
    for row, quantity in enumerate((Quantity.UTILIZATION, Quantity.POWER, Quantity.MEMORY)):
        _distribution(panels[row][0], gpus, quantity)
        _cv_over_time(panels[row][1], windows, quantity, run)
    panels[-1][0].set_xlabel("GPU")
    panels[-1][1].set_xlabel(time_axis(run.start, run.seconds).label)
    figure.suptitle(f"{run.name}: how evenly the GPUs were loaded", x=0.01, ha="left", fontsize="large")
    return save(figure, target)


def _distribution(axis: Any, gpus: Sequence[GpuSeries], quantity: Quantity) -> None:
    shown = SHOWN[quantity]
    means = np.array(
        [np.nan if (mean := mean_over_time(gpu.times, gpu.shown(quantity))) is None else mean for gpu in gpus]
    )
    if not np.isfinite(means).any():
        _nothing(axis, f"{shown.name}: not in these data")
        return
    centre = float(np.nanmean(means))
    cv = coefficient_of_variation([float(mean) for mean in means[np.isfinite(means)]]) or 0.0
    bars = axis.bar(range(len(gpus)), np.nan_to_num(means), color=COLOURS[0], width=0.75)
    axis.axhline(centre, color=COLOURS[1], linestyle="--", linewidth=1.2)
    few = len(gpus) <= MAX_BARS_WITH_NUMBERS
    if few:
        axis.bar_label(bars, [f"{mean:,.0f}" for mean in means], fontsize="small", label_type="center", color="white")
    step = 1 if few else max(1, len(gpus) // 16)
    axis.set_xticks(range(0, len(gpus), step), [str(gpu.index) for gpu in gpus[::step]], fontsize="small")
    axis.set_ylim(0, 1.12 * float(np.nanmax(means)) or 1)
    title = f"mean {shown.name} of each GPU; dashed: {centre:,.1f} {shown.unit}; CV {100 * cv:.1f} % ({band(cv).capitalize()})"
    finish(axis, y=f"{shown.name} ({shown.unit})", title=title)


def _cv_over_time(axis: Any, windows: Windows, quantity: Quantity, run: Run) -> None:
    cvs = 100 * windows.cvs[quantity]
    assert run.start is not None
    axis_of_time = time_axis(run.start, run.seconds)
    if not np.isfinite(cvs).any():
        _nothing(axis, f"no CV of {SHOWN[quantity].name}: one GPU, no data, or mean utilization of 5 % or less")
        return
    top = max(25.0, 1.1 * float(np.nanmax(cvs)))
    lower = 0.0
    for limit, name in (*((100 * below, one) for below, one in BANDS), (top, Band.POOR)):
        axis.axhspan(
            lower, limit, facecolor=BAND_COLOURS[name], alpha=0.16, hatch=HATCHES[name], edgecolor="white", linewidth=0
        )
        axis.text(
            1.005,
            (lower + min(limit, top)) / 2,
            name.capitalize(),
            va="center",
            fontsize="small",
            transform=axis.get_yaxis_transform(),
        )
        lower = limit
    marker = "o" if np.isfinite(cvs).sum() < 40 else None
    axis.plot(axis_of_time.of(windows.middles), cvs, color="black", linewidth=1.4, marker=marker, markersize=3)
    axis.set_ylim(0, top)
    finish(
        axis, y=f"CV of {SHOWN[quantity].name} (%)", title=f"CV of {SHOWN[quantity].name} over time", from_zero=False
    )


def _nothing(axis: Any, why: str) -> None:
    axis.text(0.5, 0.5, why, ha="center", va="center", color=GREY, transform=axis.transAxes, wrap=True)
    axis.set_axis_off()


MARKERS: Final = "osD^vP*X"
MAX_GRID: Final = 2000
IDLE: Final = 0.05


def total_over_time(run: Run, quantity: Quantity) -> tuple[Floats, Floats]:
    """Return the sum over all GPUs at common times; NaN while a GPU with the quantity has no value."""
    gpus = [gpu for gpu in run.gpus if gpu.has(quantity)]
    if not gpus:
        return np.empty(0), np.empty(0)
    longest = max(gpus, key=lambda gpu: len(gpu.times)).times
    times = longest if len(longest) <= MAX_GRID else np.linspace(longest[0], longest[-1], MAX_GRID)
    total = np.zeros(len(times))
    for gpu in gpus:
        values = gpu.shown(quantity)
        there = np.isfinite(values)
        total += np.interp(times, gpu.times[there], values[there], left=np.nan, right=np.nan)
    return times, total


def while_training(run: Run, times: Floats) -> NDArray[np.bool_]:
    """Return a mask of the times in the training: from the first report to the last, else while the GPUs were busy."""
    found = np.ones(len(times), dtype=np.bool_)
    if run.progress is not None and len(run.progress.times) > 1:
        bounds = run.progress.times
    else:
        at, total = total_over_time(run, Quantity.UTILIZATION)
        bounds = at[np.nan_to_num(total) > 100 * IDLE * len(run.gpus)]
    return found if not len(bounds) else np.logical_and(times >= bounds[0], times <= bounds[-1])


def write_memory_timeline(runs: Sequence[Run], target: Path) -> Path:
    """Draw the memory of all GPUs together over time, a line for each run, from each run's own start."""
    found = [(run, *total_over_time(run, Quantity.MEMORY)) for run in runs]
    found = [one for one in found if len(one[1])]
    if not found:
        raise PlotError("these runs hold no memory of GPUs")
    figure = new_figure(11, 4.8)
    panel = figure.subplots()
    axis = time_axis(0.0, max(run.seconds for run, _, _ in found))
    for place, (run, times, total) in enumerate(found):
        at, values = thinned(times - times[0], total, 500)
        panel.plot(axis.of(at), values, color=colour(place), linestyle=dash(place), linewidth=1.4, label=_name(run))
    below(figure, panel)
    what = "GPU memory over time" + (", all GPUs together" if any(len(run.gpus) > 1 for run, _, _ in found) else "")
    finish(panel, x=axis.label, y="memory in use (MiB)", title=what)
    return save(figure, target)


def below(figure: Any, panel: Any) -> None:
    """Put the legend under the panel, where it covers nothing."""
    handles, labels = panel.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) > 24 else min(4, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small", frameon=False)


def _name(run: Run) -> str:
    return f"{run.name} ({plural(len(run.gpus), 'GPU')})"


def write_memory_comparison(runs: Sequence[Run], target: Path, *, training: bool = False) -> Path:
    """Draw mean and peak memory of each run, the smallest first; ``training`` leaves out the time before and after."""
    rows: list[tuple[Run, Summary]] = []
    for run in runs:
        times, total = total_over_time(run, Quantity.MEMORY)
        inside = while_training(run, times) if training else np.full(len(times), fill_value=True)
        summary = summarize(times[inside], total[inside]) if len(times) else None
        if summary is not None:
            rows.append((run, summary))
    if not rows:
        raise PlotError("these runs hold no memory of GPUs")
    rows.sort(key=lambda row: row[1].mean)
    figure = new_figure(10, 1.6 + 0.62 * len(rows))
    panel = figure.subplots()
    most = max(summary.maximum for _, summary in rows)
    for place, (_, summary) in enumerate(rows):
        panel.barh(place, summary.mean, height=0.62, color=COLOURS[0], label="mean" if place == 0 else None)
        panel.plot(
            summary.maximum,
            place,
            marker="D",
            color=COLOURS[1],
            markersize=7,
            linestyle="",
            label="peak" if place == 0 else None,
        )
        panel.text(1.03 * most, place, _against(summary.mean, rows[0][1].mean, place), va="center", fontsize="small")
    panel.set_yticks(range(len(rows)), [_name(run) for run, _ in rows])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.38 * most if most > 0 else 1)
    below(figure, panel)
    when = "while training" if training else "over the whole run"
    finish(panel, y="", x="memory in use (MiB), all GPUs of the run", title=f"GPU memory {when}", from_zero=False)
    return save(figure, target)


def _against(mean: float, least: float, place: int) -> str:
    text = f"{mean:,.1f} MiB"
    return text if place == 0 or least <= 0 else f"{text} ({100 * (mean / least - 1):+.1f} %)"


def write_memory_against_accuracy(runs: Sequence[Run], target: Path) -> Path:
    """Draw the mean memory of each run against its best accuracy, for runs that reported one."""
    points: list[tuple[Run, float, float]] = []
    for run in runs:
        best = run.progress.best(*ACCURACIES) if run.progress is not None else None
        times, total = total_over_time(run, Quantity.MEMORY)
        summary = summarize(times, total) if len(times) else None
        if best is not None and summary is not None:
            points.append((run, summary.mean, best[1]))
    if not points:
        raise PlotError(f"no run reported memory and one of the metrics {', '.join(ACCURACIES)}")
    figure = new_figure(9, 5.5)
    panel = figure.subplots()
    for place, (run, memory, accuracy) in enumerate(points):
        mark: dict[str, Any] = {"marker": MARKERS[place % len(MARKERS)], "color": colour(place)}
        panel.plot(memory, accuracy, linestyle="", markersize=10, label=_name(run), **mark)
    panel.margins(0.15)
    below(figure, panel)
    finish(
        panel,
        x="mean memory in use (MiB), all GPUs of the run",
        y="best accuracy",
        title="Memory against accuracy (better: up and to the left)",
        from_zero=False,
    )
    return save(figure, target)


MAX_PANELS: Final = 12
BINS: Final = 40
HISTOGRAMS: Final = ("memory", "utilization", "power", "temperature", "step_time", "joules_per_sample")
LINE_DASHES: Final = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), "-.")


def _shared(runs: Sequence[Run], align: Align) -> list[tuple[Measure, list[Line]]]:
    """Return the figures that all runs have, each with a line of each run."""
    places = aligned(runs, align)
    of_runs = [lines_of(place) for place in places]
    for name in LOSSES:
        for found, place in zip(of_runs, places, strict=True):
            line = metric_line(place, name)
            if line is not None:
                found[loss(name, align)] = line
    return [
        (measure, [found[measure] for found in of_runs])
        for measure in of_runs[0]
        if all(measure in found for found in of_runs)
    ]


def write_overlay(runs: Sequence[Run], align: Align, target: Path) -> Path:
    """Draw ``gpu_comparison.png``: a panel for each figure, a line for each run."""
    shared = _shared(runs, align)[:MAX_PANELS]
    if not shared:
        raise PlotError("these runs have no figure in common to draw")
    rows = -(-len(shared) // 2)
    figure = new_figure(13, 1.0 + 2.5 * rows)
    panels = figure.subplots(rows, 2, squeeze=False, sharex=False).ravel()
    longest = max(float(np.nanmax(line.places)) for _, lines in shared for line in lines if len(line.places))
    axis = time_axis(0.0, longest)
    label = axis.label if align is Align.TIME else "training step"
    for panel, (measure, lines) in zip(panels, shared, strict=False):
        for place, line in enumerate(lines):
            x, y = _points(line)
            panel.plot(
                axis.of(x) if align is Align.TIME else x,
                y,
                color=colour(place),
                linestyle=LINE_DASHES[place % len(LINE_DASHES)],
                linewidth=1.2,
                label=f"{LETTERS[place]}: {runs[place].name}",
            )
        finish(panel, y=_label(measure), x=label, title=measure.noun, from_zero=measure.name != "temperature")
    for panel in panels[len(shared) :]:
        panel.set_axis_off()
    _legend(figure, panels[0], f"Runs at equal {'steps' if align is Align.STEP else 'time'}")
    return save(figure, target)


def _points(line: Line) -> tuple[Any, Any]:
    """Return the line in the order of the axis, thinned to the chart's resolution."""
    usable = np.isfinite(line.places) & np.isfinite(line.amounts) & (line.weights > 0)
    order = np.argsort(line.places[usable], kind="stable")
    return thinned(line.places[usable][order], (line.amounts[usable] / line.weights[usable])[order])


def _label(measure: Measure) -> str:
    return f"{measure.name.replace('_', ' ')} ({measure.unit})" if measure.unit else measure.name.replace("_", " ")


def _legend(figure: Any, panel: Any, title: str) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.suptitle(title, x=0.01, ha="left", fontsize="large")
    figure.legend(
        handles, labels, loc="outside upper right", ncols=min(4, len(labels)), fontsize="small", frameon=False
    )


def write_histograms(runs: Sequence[Run], align: Align, target: Path) -> Path:
    """Draw ``gpu_comparison_histograms.png``: how often each value was read, as a share of the run's readings; lines are means."""
    shared = [(measure, lines) for measure, lines in _shared(runs, align) if measure.name in HISTOGRAMS]
    if not shared:
        raise PlotError("these runs have no figure in common to draw")
    rows = -(-len(shared) // 2)
    figure = new_figure(13, 1.0 + 2.7 * rows)
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for panel, (measure, lines) in zip(panels, shared, strict=False):
        values = [_values(line) for line in lines]
        edges = np.histogram_bin_edges(np.concatenate(values), bins=BINS)
        for place, found in enumerate(values):
            label = f"{LETTERS[place]}: {runs[place].name}"
            shares = np.full(len(found), 100.0 / max(1, len(found)))
            panel.hist(found, bins=edges, weights=shares, color=colour(place), alpha=0.3, linewidth=0)
            panel.hist(
                found,
                bins=edges,
                weights=shares,
                histtype="step",
                color=colour(place),
                linewidth=1.3,
                label=label,
                linestyle=("-", "--", ":", "-.")[place % 4],
            )
            panel.axvline(
                float(found.mean()), color=colour(place), linestyle=("-", "--", ":", "-.")[place % 4], linewidth=1.0
            )
        finish(panel, y="readings (%)", x=_label(measure), title=measure.noun)
    for panel in panels[len(shared) :]:
        panel.set_axis_off()
    _legend(figure, panels[0], "How often each value was read (upright lines: means)")
    return save(figure, target)


def _values(line: Line) -> Any:
    usable = np.isfinite(line.places) & np.isfinite(line.amounts) & (line.weights > 0)
    values = line.amounts[usable] / line.weights[usable]
    return values if len(values) else np.zeros(1)
