"""The compared figures of runs, and their readings on a common axis, step or time, with means in equal parts of that axis."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.runs import Floats, Quantity
from orchestrator.analysis.statistics import bin_sums, energy_curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.runs import Progress, Run

LOSSES: Final = ("loss", "train_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure of a run: its name (that of ``--fail-if``), its unit, and the words of a sentence about a difference.

    ``relative``: whether a difference is given in per cent; for degrees, which have no absolute zero, that has no meaning.
    """

    name: str
    unit: str
    noun: str
    verb: str = "has"
    lower: str = "lower"
    higher: str = "higher"
    relative: bool = True


MEMORY: Final = Measure(name="memory", unit="MiB", noun="memory", verb="uses", lower="less", higher="more")
POWER: Final = Measure(name="power", unit="W", noun="power", verb="draws", lower="less", higher="more")
OF_QUANTITY: Final = {
    Quantity.MEMORY: MEMORY,
    Quantity.UTILIZATION: Measure(name="utilization", unit="%", noun="GPU utilization"),
    Quantity.POWER: POWER,
    Quantity.TEMPERATURE: Measure(name="temperature", unit="°C", noun="temperature of its hottest GPU", relative=False),
    Quantity.CLOCK: Measure(name="clock", unit="MHz", noun="SM clock"),
    Quantity.FAN: Measure(name="fan", unit="%", noun="fan speed"),
}
STEP_TIME: Final = Measure(
    name="step_time", unit="ms", noun="time for a step", verb="takes", lower="less", higher="more"
)
SAMPLES: Final = Measure(
    name="samples_per_second", unit="samples/s", noun="samples a second", verb="processes", lower="fewer", higher="more"
)
TOKENS: Final = Measure(
    name="tokens_per_second", unit="tokens/s", noun="tokens a second", verb="processes", lower="fewer", higher="more"
)
JOULES: Final = Measure(
    name="joules_per_sample", unit="J/sample", noun="energy for a sample", verb="uses", lower="less", higher="more"
)
PEAK_MEMORY: Final = Measure(
    name="peak_memory", unit="MiB", noun="memory at its peak", verb="uses", lower="less", higher="more"
)
ENERGY: Final = Measure(name="energy", unit="J", noun="energy in all", verb="uses", lower="less", higher="more")
DURATION: Final = Measure(name="duration", unit="s", noun="time in all", verb="takes", lower="less", higher="more")
FIXED: Final = (*OF_QUANTITY.values(), STEP_TIME, SAMPLES, TOKENS, JOULES, PEAK_MEMORY, ENERGY, DURATION)


def loss(name: str, axis: str) -> Measure:
    """Return a loss at equal steps, or at equal time since the first report."""
    where = "equal steps" if axis == "step" else "equal time"
    return Measure(name=f"{name}_at_{where.replace(' ', '_')}", unit="", noun=f"{name} at {where}")


def reported(name: str) -> Measure:
    """Return a metric that both scripts report; the prefix ``metric.`` distinguishes it from a figure of orch."""
    taken = any(name == measure.name for measure in FIXED)
    return Measure(name=f"metric.{name}" if taken else name, unit="", noun=name)


MAX_PARTS: Final = 2000
POINTS_A_PART: Final = 2
LEAST_PARTS: Final = 8
SUMMED: Final = (Quantity.MEMORY, Quantity.POWER)


class Align(enum.StrEnum):
    """The axis on which moments of two runs are comparable."""

    STEP = "step"
    TIME = "time"


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A run's readings of one figure along the axis: over any stretch it is the sum of ``amounts`` over that of ``weights``.

    ``moments``: each reading is the figure at its place, and runs were read at different places.
    """

    places: Floats
    amounts: Floats
    weights: Floats
    moments: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A run on the axis; time begins at the first report where every run has reports, else at the first reading."""

    run: Run
    align: Align
    origin: float

    def places(self, times: Floats) -> Floats:
        """Return the places of moments (Unix time) on the axis; NaN before the training, after it, and during a restart."""
        if self.align is Align.TIME:
            return np.where(times >= self.origin, times - self.origin, np.nan)
        progress = self.run.progress
        assert progress is not None, "only runs with reports are aligned by step"
        if len(progress.times) < 2:
            return np.full(len(times), np.nan)
        at = np.searchsorted(progress.times, times, side="right") - 1
        at = np.where(times == progress.times[-1], len(progress.times) - 2, at)
        inside = (at >= 0) & (at < len(progress.times) - 1)
        moving = np.append(_moving(progress), [False])
        found: Floats = np.interp(times, progress.times, progress.steps)
        return np.where(inside & moving[np.clip(at, 0, len(moving) - 1)], found, np.nan)


def aligned(runs: Sequence[Run], align: Align) -> list[Aligned]:
    """Return the runs on a common axis."""
    reporting = all(run.progress is not None for run in runs)
    return [
        Aligned(run, align, float(run.progress.times[0]) if reporting and run.progress else run.start or 0.0)
        for run in runs
    ]


def _moving(progress: Progress) -> np.ndarray:
    """Return a mask of the spans between two reports that belong to one attempt and made steps."""
    moving: np.ndarray = (np.diff(progress.attempts) == 0) & (np.diff(progress.steps) > 0)
    return moving


def edges_of(lines: Sequence[Line]) -> Floats | None:
    """Return the edges of equal parts of the stretch that all lines cover, with a few readings in each; None without a common one."""
    spans = [line.places[np.isfinite(line.places) & np.isfinite(line.amounts)] for line in lines]
    if any(len(span) < 2 for span in spans):
        return None
    start, end = max(float(span.min()) for span in spans), min(float(span.max()) for span in spans)
    if end <= start:
        return None
    least = min(int(((span >= start) & (span <= end)).sum()) for span in spans)
    if least < 2:
        return None
    wanted = least // POINTS_A_PART
    return np.linspace(start, end, (min(MAX_PARTS, wanted) if wanted >= LEAST_PARTS else least) + 1)


def at_common_places(first: Line, second: Line) -> tuple[Line, Line]:
    """Return both lines at every place at which either was read, as far as both reach, interpolated linearly.

    Where a figure falls steeply, two runs with the same curve would differ if each were read at places of its own.
    At the places of both runs, each is interpolated as often as the other.
    """
    curves = [_curve(line) for line in (first, second)]
    places = np.unique(np.concatenate([places for places, _ in curves]))
    reach = (places >= max(one[0][0] for one in curves)) & (places <= min(one[0][-1] for one in curves))
    places = places[reach]
    one, other = (Line(places, np.interp(places, *curve), np.ones(len(places)), moments=True) for curve in curves)
    return one, other


def _curve(line: Line) -> tuple[Floats, Floats]:
    """Return places in rising order with the figure there: the mean, where a step was repeated after a restart."""
    there = np.isfinite(line.places) & np.isfinite(line.amounts)
    places, at, counts = np.unique(line.places[there], return_inverse=True, return_counts=True)
    return places, np.bincount(at, weights=line.amounts[there]) / counts


def parts(line: Line, edges: Floats) -> tuple[Floats, Floats]:
    """Return amounts and weights of each part; 0 weight where the run has nothing in it."""
    there = np.isfinite(line.places) & np.isfinite(line.amounts) & np.isfinite(line.weights)
    there &= (line.places >= edges[0]) & (line.places <= edges[-1])
    places = line.places[there]
    return bin_sums(places, line.amounts[there], edges), bin_sums(places, line.weights[there], edges)


def gpu_line(run: Aligned, quantity: Quantity) -> Line | None:
    """Combine all GPUs of a run at their common moments: memory and power summed, the hottest temperature, else the mean."""
    gpus = [gpu for gpu in run.run.gpus if gpu.has(quantity)]
    if not gpus:
        return None
    times = max(gpus, key=lambda gpu: len(gpu.times)).times
    rows = []
    for gpu in gpus:
        values = gpu.shown(quantity)
        there = np.isfinite(values)
        if gpu.times is not times:
            values = np.interp(times, gpu.times[there], values[there], left=np.nan, right=np.nan)
        rows.append(values)
    table = np.array(rows)
    if quantity in SUMMED:
        together = table.sum(axis=0)
    else:
        together = table.max(axis=0) if quantity is Quantity.TEMPERATURE else table.mean(axis=0)
    return Line(run.places(times), together, np.ones(len(times)))


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The duration and the progress of each span between two reports of one attempt, repeated parts after a restart included."""

    places: Floats
    seconds: Floats
    steps: Floats
    samples: Floats
    tokens: Floats
    joules: Floats

    def line(self, amounts: Floats, weights: Floats) -> Line | None:
        """Return a rate as a line; None where it was not reported."""
        usable = np.isfinite(amounts) & np.isfinite(weights) & (weights > 0)
        if usable.sum() < 2 or not amounts[usable].any():
            return None
        return Line(self.places[usable], amounts[usable], weights[usable])


def spans_of(run: Aligned) -> Spans | None:
    """Return the spans of a run that reports; None for one that does not."""
    progress = run.run.progress
    if progress is None or len(progress.times) < 2:
        return None
    moving = _moving(progress)
    middles = (progress.times[1:] + progress.times[:-1]) / 2
    curves = [energy_curve(gpu) for gpu in run.run.gpus]
    joules = np.full(len(middles), np.nan)
    if curves and all(curve is not None and len(curve.times) for curve in curves):
        known = [curve for curve in curves if curve is not None]
        used = sum(
            np.diff(np.interp(progress.times, one.times, one.joules, left=np.nan, right=np.nan)) for one in known
        )
        joules = np.asarray(used)
    places = middles - run.origin if run.align is Align.TIME else (progress.steps[1:] + progress.steps[:-1]) / 2
    return Spans(
        places[moving],
        np.diff(progress.times)[moving],
        np.diff(progress.steps)[moving],
        np.diff(progress.samples)[moving],
        np.diff(progress.tokens)[moving],
        joules[moving],
    )


def metric_line(run: Aligned, name: str) -> Line | None:
    """Return a metric that the script reported; None where it did not."""
    progress = run.run.progress
    values = None if progress is None else progress.metrics.get(name)
    if progress is None or values is None or np.isfinite(values).sum() < 2:
        return None
    places = progress.steps if run.align is Align.STEP else progress.times - run.origin
    return Line(places, values, np.ones(len(values)), moments=True)
