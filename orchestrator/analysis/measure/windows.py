"""Cuts a run into equal windows of time: each GPU's means in them, the spread of the load, and the speed.

Whether an uneven load goes with slow steps is estimated from the data: the slope over windows has an interval, and an
interval that includes 0 shows no relation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.measure.intervals import Interval, interval_about
from orchestrator.analysis.reading.series import Floats, Quantity
from orchestrator.core.thresholds import UNUSED_UTILIZATION
from orchestrator.gpu.load import coefficient_of_variation

if TYPE_CHECKING:
    from orchestrator.analysis.reading.series import GpuSeries, Progress, Run

MOST_WINDOWS: Final = 400
LEAST_WINDOWS: Final = 30
LONGEST_OF_A_SHORT_RUN_SECONDS: Final = 60.0
QUANTITIES: Final = (Quantity.UTILIZATION, Quantity.MEMORY, Quantity.POWER)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Means of each GPU (rows) in each window (columns), and the CV across GPUs; NaN where there is none.

    ``edges`` are Unix times, one more than there are windows. There is no CV for one GPU, nor while the run is idle.
    """

    edges: Floats
    means: dict[Quantity, Floats]
    cvs: dict[Quantity, Floats]

    @property
    def middles(self) -> Floats:
        """The middle of each window."""
        middles: Floats = (self.edges[1:] + self.edges[:-1]) / 2
        return middles


def cut(run: Run) -> Windows | None:
    """Cut the run into windows of a minute or, where those are too few or too many, of a length that gives a few dozen or hundred."""
    start, end = run.start, run.end
    sampled = [gpu for gpu in run.gpus if len(gpu.times)]
    if start is None or end is None or end <= start or not sampled:
        return None
    period = (
        max(float(np.median(np.diff(gpu.times))) for gpu in sampled if len(gpu.times) > 1)
        if any(len(gpu.times) > 1 for gpu in sampled)
        else end - start
    )
    seconds = max(
        min(LONGEST_OF_A_SHORT_RUN_SECONDS, (end - start) / LEAST_WINDOWS), (end - start) / MOST_WINDOWS, 2 * period
    )
    count = max(1, int((end - start) / seconds + 1e-6))
    edges = np.linspace(start, end, count + 1)
    means = {quantity: np.array([_means(gpu, quantity, edges) for gpu in sampled]) for quantity in QUANTITIES}
    return Windows(edges=edges, means=means, cvs=_cvs(means))


def _means(gpu: GpuSeries, quantity: Quantity, edges: Floats) -> Floats:
    values = gpu.values.get(quantity)
    count = len(edges) - 1
    if values is None:
        return np.full(count, np.nan)
    there = np.isfinite(values)
    places = np.clip(np.searchsorted(edges, gpu.times[there], side="right") - 1, 0, count - 1)
    sums = np.bincount(places, weights=values[there], minlength=count)
    numbers = np.bincount(places, minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)


def _cvs(means: dict[Quantity, Floats]) -> dict[Quantity, Floats]:
    busy = _column_mean(means[Quantity.UTILIZATION])
    # Files without utilization still have a spread of memory and power.
    working = (busy > UNUSED_UTILIZATION) | ~np.isfinite(means[Quantity.UTILIZATION]).any()
    return {quantity: np.where(working, _cv(values), np.nan) for quantity, values in means.items()}


def _column_mean(values: Floats) -> Floats:
    numbers = np.isfinite(values).sum(axis=0)
    mean: Floats = np.where(numbers > 0, np.nansum(values, axis=0) / np.maximum(numbers, 1), np.nan)
    return mean


def _cv(values: Floats) -> Floats:
    """Return the coefficient of variation of each column; NaN where it has none."""
    columns = (column[np.isfinite(column)].tolist() for column in values.T)
    found = (coefficient_of_variation(column) for column in columns)
    return np.array([np.nan if cv is None else cv for cv in found], dtype=float)


def step_times(progress: Progress, edges: Floats) -> Floats:
    """Return seconds of a step in each window, by the steps done in it; NaN around a restart and where no step was done."""
    found = np.full(len(edges) - 1, np.nan)
    inside = (edges[:-1] >= progress.times[0]) & (edges[1:] <= progress.times[-1])
    first = np.searchsorted(progress.times, edges[:-1], side="right") - 1
    last = np.searchsorted(progress.times, edges[1:], side="left")
    for place in np.flatnonzero(inside):
        attempts = progress.attempts[first[place] : last[place] + 1]
        if len(attempts) and (attempts == attempts[0]).all():
            begun, ended = np.interp(edges[place : place + 2], progress.times, progress.steps)
            if ended > begun:
                found[place] = (edges[place + 1] - edges[place]) / (ended - begun)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceAndSpeed:
    """The relation of step time and the CV of a quantity: ``gain`` is the share of a step that an even load would have saved."""

    quantity: Quantity
    windows: int
    correlation: float
    gain: Interval


LEAST_FOR_RELATION: Final = 12


def balance_and_speed(run: Run, windows: Windows) -> BalanceAndSpeed | None:
    """Return the relation for the quantity (utilization or power) that varies more; None where there is too little data."""
    if run.progress is None or len(run.progress.times) < 2:
        return None
    seconds = step_times(run.progress, windows.edges)
    usable = {}
    for quantity in (Quantity.UTILIZATION, Quantity.POWER):
        cv = windows.cvs[quantity]
        both = np.isfinite(cv) & np.isfinite(seconds)
        if both.sum() >= LEAST_FOR_RELATION and cv[both].std() > 0 and seconds[both].std() > 0:
            usable[quantity] = (cv[both], seconds[both])
    if not usable:
        return None
    quantity = max(usable, key=lambda one: float(usable[one][0].std()))
    cv, steps = usable[quantity]
    return BalanceAndSpeed(
        quantity=quantity,
        windows=len(cv),
        correlation=float(np.corrcoef(cv, steps)[0, 1]),
        gain=_gain(cv, steps),
    )


def _gain(cv: Floats, steps: Floats) -> Interval:
    """Return the share of the mean step that the least-squares line removes at a CV of 0; ``cv`` is not constant."""
    mean, seconds = float(cv.mean()), float(steps.mean())
    apart = cv - mean
    square = float((apart**2).mean())
    slope = float((apart * (steps - seconds)).mean()) / square
    residuals = steps - seconds - slope * apart
    # A window far from the mean CV pulls the line towards itself: its own error is larger than its residual.
    leverage = 1.0 / len(cv) + apart**2 / (square * len(cv))
    on_slope = apart * residuals / np.maximum(1.0 - leverage, 0.1) / square
    # The mean CV and the mean step of this run count as exact; only the line is subject to chance.
    return interval_about(slope * mean / seconds, on_slope * mean / seconds)
