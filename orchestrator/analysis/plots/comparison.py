"""Charts of several runs: lines along their common axis, and histograms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.comparison import measures
from orchestrator.analysis.comparison.alignment import Align, aligned, metric_line
from orchestrator.analysis.comparison.comparing import LETTERS, lines_of
from orchestrator.analysis.plots.style import PlotError, colour, finish, new_figure, save, thinned, time_axis

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.analysis.comparison.alignment import Line
    from orchestrator.analysis.comparison.measures import Measure
    from orchestrator.analysis.reading.series import Run

MOST_PANELS: Final = 12
BINS: Final = 40
HISTOGRAMS: Final = ("memory", "utilization", "power", "temperature", "step_time", "joules_per_sample")
DASHES: Final = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), "-.")


def _shared(runs: Sequence[Run], align: Align) -> list[tuple[Measure, list[Line]]]:
    """Return the figures that all runs have, each with a line of each run."""
    places = aligned(runs, align)
    of_runs = [lines_of(place) for place in places]
    for name in measures.LOSSES:
        for found, place in zip(of_runs, places, strict=True):
            line = metric_line(place, name)
            if line is not None:
                found[measures.loss(name, align)] = line
    return [
        (measure, [found[measure] for found in of_runs])
        for measure in of_runs[0]
        if all(measure in found for found in of_runs)
    ]


def write_overlay(runs: Sequence[Run], align: Align, target: Path) -> Path:
    """Draw ``gpu_comparison.png``: a panel for each figure, a line for each run."""
    shared = _shared(runs, align)[:MOST_PANELS]
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
                linestyle=DASHES[place % len(DASHES)],
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
