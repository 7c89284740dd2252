"""Reads a trial's results so far from its job's records: objectives, and a metric at steps that all trials share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from orchestrator.analysis.matrices.summary import figures_of
from orchestrator.analysis.reading.progress import read_progress
from orchestrator.analysis.reading.sources import SourceError, read_run
from orchestrator.spec.search import MEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from orchestrator.analysis.reading.series import Floats, Progress

_GROWTH = 1.1


def objectives_given(directory: Path, names: Iterable[str]) -> tuple[tuple[float, ...] | None, str]:
    """Return the objectives of an ended trial; None, and a text about the missing one, where they are not complete.

    The last reported value of a metric counts: the state in which the trial ended.
    """
    try:
        run = read_run(directory)
    except SourceError:
        return None, "it has recorded nothing"
    measured = figures_of(run, None)
    found = []
    for name in names:
        value = measured.get(name) if name in MEASURED else _last(run.progress, name)
        if value is None:
            return None, f"{name} was not {'measured' if name in MEASURED else 'reported'}"
        if not np.isfinite(value):
            return None, f"{name} ended as {value}"
        found.append(float(value))
    return tuple(found), ""


def _last(progress: Progress | None, name: str) -> float | None:
    values = None if progress is None else progress.metrics.get(name)
    return float(values[-1]) if values is not None and len(values) else None


def reported_by_step(directory: Path, name: str, order: str, *, running: bool) -> dict[int, float]:
    """Return a metric at shared steps; empty where there is none.

    Between two reports it is interpolated; for a running trial it is the better of both (`order` is `min` or `max`).
    """
    progress = read_progress(directory / "metrics.jsonl")
    values = None if progress is None else progress.metrics.get(name)
    if progress is None or values is None:
        return {}
    first = int(np.argmax(np.isfinite(values))) if np.isfinite(values).any() else 0
    return at_shared_steps(progress.steps[first:], values[first:], better=order if running else None)


def at_shared_steps(
    steps: Floats | Sequence[float], values: Floats | Sequence[float], *, better: str | None = None
) -> dict[int, float]:
    """Return the values at the steps of a fixed grid that the reports enclose: interpolated, or the better of both reports.

    Reports are made by time, so two trials hardly ever report the same step, and a pruner compares equal steps only. A loss
    falls fast and then slowly: a line between distant reports lies above it, and would end a trial only because its reports lie
    further from the step than those of others. For steps that were trained again after a restart, the later report counts.
    """
    newest = dict(zip((int(step) for step in steps), (float(value) for value in values), strict=True))
    if not newest:
        return {}
    known = np.array(sorted(newest))
    reports = np.array([newest[step] for step in sorted(newest)])
    grid = np.array([step for step in shared_steps(int(known[-1])) if step >= known[0]])
    if better is None:
        found = np.interp(grid, known, reports)
    else:
        of_both = np.maximum if better == "max" else np.minimum
        after = np.searchsorted(known, grid)
        before = np.where(known[after] == grid, after, after - 1)
        found = of_both(reports[before], reports[after])  # NaN if one of them is NaN
    return dict(zip(grid.tolist(), found.tolist(), strict=True))


def shared_steps(last: int) -> list[int]:
    """Return the steps at which trials are compared: each one at first, later a tenth apart."""
    found, step = [], 1
    while step <= last:
        found.append(step)
        step = max(step + 1, int(step * _GROWTH))
    return found
