"""Compares runs with a first one, the baseline: per figure both means, the difference with its interval, and the result.

Two runs are cut into the same parts of their common axis, and the differences of the pairs of parts form a series.
What both runs have in common (a warm-up, an epoch's rhythm, a falling loss) cancels out of it; the correlation of
neighbouring differences widens the interval.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.comparison import measures
from orchestrator.analysis.comparison.alignment import (
    Align,
    Aligned,
    Line,
    aligned,
    at_common_places,
    edges_of,
    gpu_line,
    metric_line,
    parts,
    spans_of,
)
from orchestrator.analysis.measure.intervals import Interval, interval_about
from orchestrator.analysis.measure.statistics import energy_curve
from orchestrator.analysis.reading.series import Quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.comparison.measures import Measure
    from orchestrator.analysis.reading.series import Floats, Run

LETTERS: Final = "ABCDEFGH"
MOST_RUNS: Final = len(LETTERS)
MOST_METRICS: Final = 32
ROUNDING: Final = 1e-9
"""Differences below this share of the figures are rounding errors."""


class CompareError(Exception):
    """These runs cannot be compared; the message gives the reason and what to do."""


class Outcome(enum.StrEnum):
    """The result for a difference."""

    LOWER = "lower"
    HIGHER = "higher"
    NONE_SHOWN = "none_shown"
    TOO_FEW = "too_few_readings"
    SINGLE = "single_figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of two runs: ``difference`` is the second's minus the baseline's, ``relative`` is that as a share of the baseline.

    ``lower_share`` and ``higher_share``: the shares of the parts, from 0 to 1, in which the second is lower and higher.
    """

    measure: Measure
    baseline: float
    other: float
    difference: Interval
    relative: Interval | None
    outcome: Outcome
    aligned_by: Align | None = None
    parts: int = 0
    lower_share: float = 0.0
    higher_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run and the baseline; ``start`` and ``end`` bound the stretch of the axis that both cover."""

    letter: str
    name: str
    rows: tuple[Row, ...]
    start: float | None
    end: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All runs, each compared with the first."""

    align: Align
    names: tuple[str, ...]
    pairs: tuple[Pair, ...]


def chosen_alignment(runs: Sequence[Run]) -> Align:
    """Return the alignment: by step where every run reports its steps, else by time."""
    reporting = all(run.progress is not None and len(run.progress.times) > 1 for run in runs)
    return Align.STEP if reporting else Align.TIME


def compare(runs: Sequence[Run], align: Align | None = None) -> Comparison:
    """Compare runs with the first. Raises CompareError."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise CompareError(f"compare 2 to {MOST_RUNS} runs, not {len(runs)}")
    chosen = align or chosen_alignment(runs)
    for run in runs:
        if chosen is Align.STEP and (run.progress is None or len(run.progress.times) < 2):
            raise CompareError(f"{run.name} reports no steps; compare by time: --align time")
    pairs = tuple(_pair(runs[0], run, chosen, letter) for run, letter in zip(runs[1:], LETTERS[1:], strict=False))
    for pair in pairs:
        if all(row.measure is measures.DURATION for row in pair.rows):
            raise CompareError(f"{runs[0].name} and {pair.name} have no figure in common (aligned by {chosen})")
    return Comparison(align=chosen, names=tuple(run.name for run in runs), pairs=pairs)


def _pair(first: Run, second: Run, align: Align, letter: str) -> Pair:
    one, other = aligned((first, second), align)
    mine, theirs = lines_of(one), lines_of(other)
    rows = [
        row for measure in mine if measure in theirs and (row := _row(measure, mine[measure], theirs[measure], align))
    ]
    for axis in Align:
        both = [_losses(run) for run in aligned((first, second), axis)]
        rows += [
            row
            for measure in both[0]
            if measure in both[1] and (row := _row(measure, both[0][measure], both[1][measure], axis))
        ]
    rows += _single_figures(first, second)
    bounds = [
        edges
        for measure in mine
        if measure in theirs
        if (edges := edges_of((mine[measure], theirs[measure]))) is not None
    ]
    return Pair(
        letter=letter,
        name=second.name,
        rows=tuple(rows),
        start=min((float(edges[0]) for edges in bounds), default=None),
        end=max((float(edges[-1]) for edges in bounds), default=None),
    )


def lines_of(run: Aligned) -> dict[Measure, Line]:
    """Return everything of a run that can be compared along the axis, except its losses."""
    found = {measure: gpu_line(run, quantity) for quantity, measure in measures.OF_QUANTITY.items()}
    spans = spans_of(run)
    if spans is not None:
        found |= {
            measures.STEP_TIME: spans.line(1e3 * spans.seconds, spans.steps),
            measures.SAMPLES: spans.line(spans.samples, spans.seconds),
            measures.TOKENS: spans.line(spans.tokens, spans.seconds),
            measures.JOULES: spans.line(spans.joules, spans.samples),
        }
    names = [] if run.run.progress is None else sorted(run.run.progress.metrics)
    for name in [name for name in names if name not in measures.LOSSES][:MOST_METRICS]:
        found[measures.reported(name)] = metric_line(run, name)
    return {measure: line for measure, line in found.items() if line is not None}


def _losses(run: Aligned) -> dict[Measure, Line]:
    if run.run.progress is None:
        return {}
    found = {measures.loss(name, run.align): metric_line(run, name) for name in measures.LOSSES}
    return {measure: line for measure, line in found.items() if line is not None}


def _row(measure: Measure, first: Line, second: Line, align: Align) -> Row | None:
    """Return the figure of both over their common stretch; None where there is none."""
    edges = edges_of((first, second))
    if edges is None:
        return None
    if first.moments and second.moments:
        first, second = at_common_places(first, second)
    one, other = parts(first, edges), parts(second, edges)
    usable = (one[1] > 0) & (other[1] > 0)
    if not usable.any():
        return None
    baseline, (mean, deviations) = _ratio(one[0][usable], one[1][usable]), _ratio(other[0][usable], other[1][usable])
    apart = other[0][usable] / other[1][usable] - one[0][usable] / one[1][usable]
    rounding = ROUNDING * max(abs(mean), abs(baseline[0]))
    difference = _interval(mean - baseline[0], deviations - baseline[1], scale=max(abs(mean), abs(baseline[0])))
    relative = None
    if measure.relative and baseline[0] > 0:
        change = deviations / baseline[0] - mean * baseline[1] / baseline[0] ** 2
        relative = _interval(mean / baseline[0] - 1.0, change, scale=max(1.0, abs(mean / baseline[0])))
    return Row(
        measure=measure,
        baseline=baseline[0],
        other=mean,
        difference=difference,
        relative=relative,
        outcome=_outcome(relative or difference),
        aligned_by=align,
        parts=int(usable.sum()),
        lower_share=float((apart < -rounding).mean()),
        higher_share=float((apart > rounding).mean()),
    )


def _ratio(amounts: Floats, weights: Floats) -> tuple[float, Floats]:
    """Return amount over weight, and the linear influence of each part on it."""
    value = float(amounts.sum() / weights.sum())
    return value, (amounts - value * weights) / float(weights.mean())


def _interval(value: float, deviations: Floats, *, scale: float) -> Interval:
    """Return a figure with the interval of a mean with these deviations."""
    if float(np.abs(deviations).max()) <= ROUNDING * scale:
        value = 0.0 if abs(value) <= ROUNDING * scale else value
        deviations = np.zeros(len(deviations))
    return interval_about(value, deviations)


def _outcome(interval: Interval) -> Outcome:
    if interval.low is None or interval.high is None:
        return Outcome.TOO_FEW
    if not interval.excludes_zero:
        return Outcome.NONE_SHOWN
    return Outcome.LOWER if interval.value < 0 else Outcome.HIGHER


def _single_figures(first: Run, second: Run) -> list[Row]:
    """Return figures that a run has only once, which have no interval."""
    one, other = _singles(first), _singles(second)
    rows = []
    for measure in one:
        if measure in other:
            difference = Interval(value=other[measure] - one[measure], low=None, high=None)
            relative = (
                Interval(value=other[measure] / one[measure] - 1.0, low=None, high=None) if one[measure] > 0 else None
            )
            rows.append(
                Row(
                    measure=measure,
                    baseline=one[measure],
                    other=other[measure],
                    difference=difference,
                    relative=relative,
                    outcome=Outcome.SINGLE,
                )
            )
    return rows


def _singles(run: Run) -> Mapping[Measure, float]:
    found = {measures.DURATION: run.seconds}
    memory = gpu_line(aligned((run,), Align.TIME)[0], Quantity.MEMORY)
    if memory is not None and np.isfinite(memory.amounts).any():
        found[measures.PEAK_MEMORY] = float(np.nanmax(memory.amounts))
    curves = [curve for gpu in run.gpus if (curve := energy_curve(gpu)) is not None]
    if curves and len(curves) == len(run.gpus):
        found[measures.ENERGY] = sum(curve.total for curve in curves)
    return found
