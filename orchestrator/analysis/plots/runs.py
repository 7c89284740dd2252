"""Charts of several runs side by side: memory of each, memory over time, memory against accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.measure.run_summary import ACCURACIES
from orchestrator.analysis.measure.statistics import summarize
from orchestrator.analysis.plots.style import (
    COLOURS,
    PlotError,
    colour,
    dash,
    finish,
    new_figure,
    save,
    thinned,
    time_axis,
)
from orchestrator.analysis.reading.series import Quantity

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from orchestrator.analysis.measure.statistics import Summary
    from orchestrator.analysis.reading.series import Floats, Run

MARKERS: Final = "osD^vP*X"
MOST_GRID: Final = 2000
IDLE: Final = 0.05


def total_over_time(run: Run, quantity: Quantity) -> tuple[Floats, Floats]:
    """Return the sum over all GPUs at common times; NaN while a GPU with the quantity has no value."""
    gpus = [gpu for gpu in run.gpus if gpu.has(quantity)]
    if not gpus:
        return np.empty(0), np.empty(0)
    longest = max(gpus, key=lambda gpu: len(gpu.times)).times
    times = longest if len(longest) <= MOST_GRID else np.linspace(longest[0], longest[-1], MOST_GRID)
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
    return f"{run.name} ({len(run.gpus)} GPU{'' if len(run.gpus) == 1 else 's'})"


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
