"""Draws simulated policies: waiting times, and busy GPUs and waiting jobs over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from orchestrator.analysis.plots.style import colour, dash, finish, new_figure, save, time_axis

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from orchestrator.analysis.simulation.comparison import Result


def write_picture(results: Sequence[Result], target: Path) -> Path:
    """Draw three panels with a line for each policy. Raises PlotError without matplotlib, and OSError."""
    figure = new_figure(11, 9)
    waits, busy, queued = figure.subplots(3, 1)
    start = min((r.outcome.samples[0][0] for r in results if r.outcome.samples), default=0.0)
    end = max((r.outcome.samples[-1][0] for r in results if r.outcome.samples), default=0.0)
    axis = time_axis(start, end - start)
    for place, result in enumerate(results):
        look = {"color": colour(place), "linestyle": dash(place), "label": result.policy}
        ordered = np.sort(np.array([one.wait for one in result.outcome.ran])) / 3600
        waits.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), **look)
        samples = np.array(result.outcome.samples, dtype=float).reshape(-1, 3)
        times = axis.of(samples[:, 0])
        busy.plot(times, samples[:, 1], **look)
        queued.plot(times, samples[:, 2], **look)
    waits.set_xscale("symlog", linthresh=0.01)
    finish(waits, y="share of jobs", x="wait (h)")
    finish(busy, y="busy GPUs")
    finish(queued, y="waiting jobs", x=axis.label)
    handles, labels = waits.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize="small", frameon=False)
    return save(figure, target)
