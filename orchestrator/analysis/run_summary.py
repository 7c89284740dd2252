"""All figures of a run for a report, as one frozen record; also by equal windows of time: each GPU's means, the spread of the load, the speed.

Whether an uneven load goes with slow steps is estimated from the data: the slope over windows has an interval, and an
interval that includes 0 shows no relation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.runs import SHOWN, Floats, Quantity
from orchestrator.analysis.statistics import (
    EnergyCurve,
    Interval,
    Summary,
    bin_means,
    energy_curve,
    interval_about,
    mean_interval,
    mean_over_time,
    summarize,
)
from orchestrator.core.thresholds import UNUSED_UTILIZATION
from orchestrator.gpu.load import Balance, GpuLoad, balance, coefficient_of_variation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.runs import GpuSeries, Progress, Run

MAX_WINDOWS: Final = 400
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
        min(LONGEST_OF_A_SHORT_RUN_SECONDS, (end - start) / LEAST_WINDOWS), (end - start) / MAX_WINDOWS, 2 * period
    )
    count = max(1, int((end - start) / seconds + 1e-6))
    edges = np.linspace(start, end, count + 1)
    means = {quantity: np.array([_means(gpu, quantity, edges) for gpu in sampled]) for quantity in QUANTITIES}
    return Windows(edges=edges, means=means, cvs=_cvs(means))


def _means(gpu: GpuSeries, quantity: Quantity, edges: Floats) -> Floats:
    values = gpu.values.get(quantity)
    return np.full(len(edges) - 1, np.nan) if values is None else bin_means(gpu.times, values, edges)


def _cvs(means: dict[Quantity, Floats]) -> dict[Quantity, Floats]:
    used = means[Quantity.UTILIZATION]
    counts = np.isfinite(used).sum(axis=0)
    # Files without utilization still have a spread of memory and power.
    working = (np.nansum(used, axis=0) > UNUSED_UTILIZATION * counts) | (not counts.any())
    return {quantity: np.where(working, _cv(values), np.nan) for quantity, values in means.items()}


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


JOULES_PER_KWH: Final = 3.6e6
BEFORE: Final = "before the first report"
RESTARTING: Final = "restarting"
ACCURACIES: Final = ("accuracy", "val_accuracy", "test_accuracy", "eval_accuracy", "acc", "val_acc")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """One GPU over the run; ``quantities`` in display units."""

    label: str
    model: str
    uuid: str
    seconds: float
    samples: int
    quantities: Mapping[Quantity, Summary]
    energy_joules: float | None
    energy_counted: bool
    memory_total_mib: float | None
    throttled_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of the training: figures of steps and samples over the time in which it reported."""

    steps: int
    attempts: int
    step_seconds: Interval | None
    samples_per_second: float | None
    tokens_per_second: float | None
    joules_per_sample: float | None
    best_accuracy: tuple[str, float] | None
    last_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Memory that the allocator reserves and has not handed out, as a share of its reserve; and its change per hour."""

    mean_ratio: float
    last_ratio: float
    change_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Everything in a report of a run."""

    name: str
    start: float | None
    end: float | None
    seconds: float
    samples: int
    dropped: int
    repaired: bool
    gpus: tuple[GpuSummary, ...]
    memory_mib: float | None
    power_watts: float | None
    balance: Balance
    energy_joules: float | None
    energy_by_phase: Mapping[str, float]
    cost: float | None
    speed: Speed | None
    relation: BalanceAndSpeed | None
    fragmentation: Fragmentation | None


def summarize_run(run: Run, *, windows: Windows | None = None, price_per_kwh: float | None = None) -> RunSummary:
    """Compute the figures of a run; ``windows`` are those of ``cut``, if available."""
    curves = [energy_curve(gpu) for gpu in run.gpus]
    known = [curve for curve in curves if curve is not None]
    joules = sum(curve.total for curve in known) if known else None
    gpus = tuple(_gpu(gpu, curve) for gpu, curve in zip(run.gpus, curves, strict=True))
    if windows is None:
        windows = cut(run)
    return RunSummary(
        name=run.name,
        start=run.start,
        end=run.end,
        seconds=run.seconds,
        samples=run.samples,
        dropped=run.dropped,
        repaired=run.repaired,
        gpus=gpus,
        memory_mib=_total(gpus, Quantity.MEMORY),
        power_watts=_total(gpus, Quantity.POWER),
        balance=balance({gpu.label: _load(gpu) for gpu in run.gpus}),
        energy_joules=joules,
        energy_by_phase=_by_phase(run, known),
        cost=None if joules is None or price_per_kwh is None else joules / JOULES_PER_KWH * price_per_kwh,
        speed=_speed(run.progress, known),
        relation=None if windows is None else balance_and_speed(run, windows),
        fragmentation=_fragmentation(run.progress),
    )


def _gpu(gpu: GpuSeries, curve: EnergyCurve | None) -> GpuSummary:
    found = {quantity: summarize(gpu.times, gpu.shown(quantity)) for quantity in Quantity if gpu.has(quantity)}
    total = gpu.memory_total_bytes
    return GpuSummary(
        label=gpu.label,
        model=gpu.model,
        uuid=gpu.uuid,
        seconds=float(gpu.times[-1] - gpu.times[0]) if len(gpu.times) else 0.0,
        samples=len(gpu.times),
        quantities={quantity: summary for quantity, summary in found.items() if summary is not None},
        energy_joules=None if curve is None else curve.total,
        energy_counted=curve is not None and curve.counted,
        memory_total_mib=None if total is None else total * SHOWN[Quantity.MEMORY].factor,
        throttled_samples=gpu.throttled,
    )


def _total(gpus: Sequence[GpuSummary], quantity: Quantity) -> float | None:
    """Return the sum of the GPUs' means; None where no GPU has the quantity."""
    means = [gpu.quantities[quantity].mean for gpu in gpus if quantity in gpu.quantities]
    return sum(means) if means else None


def _load(gpu: GpuSeries) -> GpuLoad | None:
    if not len(gpu.times):
        return None
    utilization, memory, power = (
        None if (values := gpu.values.get(quantity)) is None else mean_over_time(gpu.times, values)
        for quantity in (Quantity.UTILIZATION, Quantity.MEMORY, Quantity.POWER)
    )
    return GpuLoad(utilization=utilization, memory=memory, power=power)


def _by_phase(run: Run, curves: Sequence[EnergyCurve]) -> dict[str, float]:
    """Return joules by the phases that the training reported; empty where it reported none."""
    progress = run.progress
    if progress is None or not any(progress.phases) or not curves or run.start is None or run.end is None:
        return {}
    found: defaultdict[str, float] = defaultdict(float)
    edges = np.concatenate(([run.start], progress.times, [run.end]))
    joules = sum(
        np.interp(edges, curve.times, curve.joules) if len(curve.times) else np.zeros(len(edges)) for curve in curves
    )
    restarts = np.diff(progress.attempts) != 0
    for place, used in enumerate(np.diff(np.asarray(joules))):
        if place == 0:
            phase = BEFORE
        elif place <= len(restarts) and restarts[place - 1]:
            phase = RESTARTING
        else:
            phase = progress.phases[place - 1] or "no phase"
        found[phase] += float(used)
    return {phase: joules for phase, joules in found.items() if joules > 0.0}


def _speed(progress: Progress | None, curves: Sequence[EnergyCurve]) -> Speed | None:
    if progress is None:
        return None
    same = np.diff(progress.attempts) == 0
    spans, steps = np.diff(progress.times), np.diff(progress.steps)
    moved = same & (steps > 0)
    per_step = np.repeat((spans / np.maximum(steps, 1))[moved], 1)
    losses = [
        values[np.isfinite(values)] for name, values in progress.metrics.items() if name in {"loss", "train_loss"}
    ]
    used = sum(curve.between(float(progress.times[0]), float(progress.times[-1])) for curve in curves)
    samples = _gained(progress.samples)
    return Speed(
        steps=int(np.nanmax(progress.steps)),
        attempts=len(np.unique(progress.attempts[np.isfinite(progress.attempts)])) or 1,
        step_seconds=mean_interval(per_step) if len(per_step) else None,
        samples_per_second=_rate(progress.samples, spans, same),
        tokens_per_second=_rate(progress.tokens, spans, same),
        joules_per_sample=used / samples if curves and used > 0 and samples > 0 else None,
        best_accuracy=progress.best(*ACCURACIES),
        last_loss=float(losses[0][-1]) if losses and len(losses[0]) else None,
    )


def _gained(totals: np.ndarray) -> float:
    """Return the progress of the run: work repeated after a restart counts once."""
    there = totals[np.isfinite(totals)]
    return float(there.max() - there[0]) if len(there) else 0.0


def _rate(totals: np.ndarray, spans: np.ndarray, same: np.ndarray) -> float | None:
    """Return units a second outside of restarts; None where they were not reported."""
    grown = np.diff(totals)
    usable = same & np.isfinite(grown) & (grown >= 0)
    seconds = float(spans[usable].sum())
    return float(grown[usable].sum()) / seconds if seconds > 0 and grown[usable].sum() > 0 else None


def _fragmentation(progress: Progress | None) -> Fragmentation | None:
    """Compute it from the metrics ``memory_reserved_bytes`` and ``memory_allocated_bytes``, where a script reports them."""
    metrics = {} if progress is None else progress.metrics
    reserved, allocated = metrics.get("memory_reserved_bytes"), metrics.get("memory_allocated_bytes")
    if progress is None or reserved is None or allocated is None:
        return None
    usable = np.isfinite(reserved) & np.isfinite(allocated) & (reserved > 0)
    if usable.sum() < 2:
        return None
    shares = np.clip(1.0 - allocated[usable] / reserved[usable], 0.0, 1.0)
    hours = (progress.times[usable] - progress.times[usable][0]) / 3600
    slope = float(np.polyfit(hours, shares, 1)[0]) if hours[-1] > 0 else math.nan
    return Fragmentation(
        mean_ratio=float(shares.mean()),
        last_ratio=float(shares[-1]),
        change_per_hour=slope if math.isfinite(slope) else 0.0,
    )
