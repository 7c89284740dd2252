"""Charts of one run's GPUs: memory of each, the spread of their load, and everything over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.measure.statistics import mean_over_time
from orchestrator.analysis.plots.style import (
    BAND_COLOURS,
    COLOURS,
    GREY,
    HATCHES,
    MOST_LINES,
    PlotError,
    colour,
    dash,
    finish,
    grid_of,
    new_figure,
    save,
    thinned,
    time_axis,
)
from orchestrator.analysis.reading.series import SHOWN, GpuSeries, Quantity
from orchestrator.gpu.load import BANDS, Band, band, coefficient_of_variation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.analysis.measure.windows import Windows
    from orchestrator.analysis.plots.style import TimeAxis
    from orchestrator.analysis.reading.series import Run

OVERVIEW: Final = (Quantity.UTILIZATION, Quantity.MEMORY, Quantity.POWER, Quantity.TEMPERATURE, Quantity.CLOCK)
MOST_BARS_WITH_NUMBERS: Final = 16
MOST_PANELS_WITH_LABELS: Final = 16


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
    if len(having) > MOST_LINES:
        _range(axis, having, quantity, time)
        return
    for place, gpu in enumerate(having):
        times, values = thinned(gpu.times, gpu.shown(quantity))
        axis.plot(time.of(times), values, linewidth=1.1, color=colour(place), linestyle=dash(place), label=gpu.label)


def _range(axis: Any, gpus: Sequence[GpuSeries], quantity: Quantity, time: TimeAxis) -> None:
    start, end = min(gpu.times[0] for gpu in gpus), max(gpu.times[-1] for gpu in gpus)
    count = max(2, min(400, min(len(gpu.times) for gpu in gpus) // 2))
    edges = np.linspace(start, end, count + 1)
    rows = []
    for gpu in gpus:
        values = gpu.shown(quantity)
        there = np.isfinite(values)
        places = np.clip(np.searchsorted(edges, gpu.times[there], side="right") - 1, 0, count - 1)
        numbers = np.bincount(places, minlength=count)
        sums = np.bincount(places, weights=values[there], minlength=count)
        rows.append(np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan))
    table = np.array(rows)
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
    large = len(gpus) <= MOST_PANELS_WITH_LABELS
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
    few = len(gpus) <= MOST_BARS_WITH_NUMBERS
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
