"""Compares runs with a first one, the baseline: per figure both means, the difference with its interval, and the result in words.

Two runs are cut into the same parts of their common axis, and the differences of the pairs of parts form a series.
What both runs have in common (a warm-up, an epoch's rhythm, a falling loss) cancels out of it; the correlation of
neighbouring differences widens the interval.
"""

from __future__ import annotations

import enum
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from orchestrator.analysis.alignment import (
    DURATION,
    ENERGY,
    JOULES,
    LOSSES,
    OF_QUANTITY,
    PEAK_MEMORY,
    SAMPLES,
    STEP_TIME,
    TOKENS,
    Align,
    Aligned,
    Line,
    aligned,
    at_common_places,
    edges_of,
    gpu_line,
    loss,
    metric_line,
    parts,
    reported,
    spans_of,
)
from orchestrator.analysis.runs import Quantity
from orchestrator.analysis.statistics import Interval, energy_curve, interval_about
from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.analysis.alignment import Measure
    from orchestrator.analysis.runs import Floats, Run

LETTERS: Final = "ABCDEFGH"
MAX_RUNS: Final = len(LETTERS)
MAX_METRICS: Final = 32
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
    if not 2 <= len(runs) <= MAX_RUNS:
        raise CompareError(f"compare 2 to {MAX_RUNS} runs, not {len(runs)}")
    chosen = align or chosen_alignment(runs)
    for run in runs:
        if chosen is Align.STEP and (run.progress is None or len(run.progress.times) < 2):
            raise CompareError(f"{run.name} reports no steps; compare by time: --align time")
    pairs = tuple(_pair(runs[0], run, chosen, letter) for run, letter in zip(runs[1:], LETTERS[1:], strict=False))
    for pair in pairs:
        if all(row.measure is DURATION for row in pair.rows):
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
    found = {measure: gpu_line(run, quantity) for quantity, measure in OF_QUANTITY.items()}
    spans = spans_of(run)
    if spans is not None:
        found |= {
            STEP_TIME: spans.line(1e3 * spans.seconds, spans.steps),
            SAMPLES: spans.line(spans.samples, spans.seconds),
            TOKENS: spans.line(spans.tokens, spans.seconds),
            JOULES: spans.line(spans.joules, spans.samples),
        }
    names = [] if run.run.progress is None else sorted(run.run.progress.metrics)
    for name in [name for name in names if name not in LOSSES][:MAX_METRICS]:
        found[reported(name)] = metric_line(run, name)
    return {measure: line for measure, line in found.items() if line is not None}


def _losses(run: Aligned) -> dict[Measure, Line]:
    if run.run.progress is None:
        return {}
    found = {loss(name, run.align): metric_line(run, name) for name in LOSSES}
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
            difference = Interval(other[measure] - one[measure])
            relative = Interval(other[measure] / one[measure] - 1.0) if one[measure] > 0 else None
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
    found = {DURATION: run.seconds}
    memory = gpu_line(aligned((run,), Align.TIME)[0], Quantity.MEMORY)
    if memory is not None and np.isfinite(memory.amounts).any():
        found[PEAK_MEMORY] = float(np.nanmax(memory.amounts))
    curves = [curve for gpu in run.gpus if (curve := energy_curve(gpu)) is not None]
    if curves and len(curves) == len(run.gpus):
        found[ENERGY] = sum(curve.total for curve in curves)
    return found


_FORM: Final = re.compile(
    r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(%?)\s*", re.ASCII
)
_COMPARED: Final = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
MAX_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A bound on the difference from the baseline: a share of it (``percent``), or in the figure's own unit."""

    text: str
    name: str
    sign: str
    bound: float
    percent: bool

    def holds(self, row: Row) -> bool:
        """Whether the difference exceeds the bound and is significant; without an interval the figures decide."""
        if row.outcome is Outcome.NONE_SHOWN:
            return False
        if not self.percent:
            return bool(_COMPARED[self.sign](row.difference.value, self.bound))
        if row.relative is None:
            raise CompareError(f"{self.text!r}: {self.name} has no difference in per cent; give the bound in its unit")
        return bool(_COMPARED[self.sign](100 * row.relative.value, self.bound))


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A condition that holds for a run, with its figure."""

    condition: Condition
    letter: str
    row: Row


def parse_condition(text: str) -> Condition:
    """Parse a condition. Raises CompareError with the expected form."""
    match = _FORM.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        raise CompareError(
            f"{text[:MAX_CHARACTERS]!r} is not a condition; write METRIC>+5%, METRIC<-0.1 or the like, for example memory>+5%"
        )
    return Condition(text=text.strip(), name=match[1], sign=match[2], bound=float(match[3]), percent=bool(match[4]))


def broken(comparison: Comparison, conditions: Sequence[Condition]) -> list[Broken]:
    """Return the conditions that hold, for each run. Raises CompareError for a metric that is not compared, so that no check passes unnoticed."""
    found = []
    for condition in conditions:
        for pair in comparison.pairs:
            row = next((row for row in pair.rows if row.measure.name == condition.name), None)
            if row is None:
                known = ", ".join(sorted(row.measure.name for row in pair.rows))
                raise CompareError(
                    f"{condition.text!r}: {condition.name} is not compared between these runs; there are: {known}"
                )
            if condition.holds(row):
                found.append(Broken(condition=condition, letter=pair.letter, row=row))
    return found


CAUTION: Final = (
    "Intervals are of these runs: another run of the same configuration may differ by more. "
    "Of twenty figures without a difference, one shows one by chance."
)

NEARLY_ALL: Final = 0.95
"""A difference without a result is reported if at least this share of the parts has its sign: one slow movement, or two curves that stay apart."""


def comparison_text(comparison: Comparison) -> str:
    """Return the whole comparison as text."""
    lines = [f"{letter} = {name}" for letter, name in zip(LETTERS, comparison.names, strict=False)]
    lines[0] += " (baseline)"
    for pair in comparison.pairs:
        lines += ["", *_pair_lines(pair, comparison.align)]
    return "\n".join([*lines, "", CAUTION]) + "\n"


def _pair_lines(pair: Pair, align: Align) -> Iterator[str]:
    yield f"{pair.letter} against A, {stretch(pair, align)}"
    yield f"{'':<28}{'A':>12}{pair.letter:>12}{'difference':>12}  95 % interval"
    for row in pair.rows:
        unit = f" ({row.measure.unit})" if row.measure.unit else ""
        yield (
            f"{row.measure.name + unit:<28}{row.baseline:>12.5g}{row.other:>12.5g}{change(row):>12}  {bounds(row)}"
        ).rstrip()
    yield ""
    for row in pair.rows:
        if row.outcome is not Outcome.SINGLE:
            yield f"  {sentence(row, pair.letter)}"


def stretch(pair: Pair, align: Align) -> str:
    """Return which part of the runs was compared."""
    if pair.start is None or pair.end is None:
        return f"aligned by {align}"
    if align is Align.STEP:
        return f"at equal steps, {pair.start:.0f} to {pair.end:.0f}"
    return f"at equal time, {pair.start:.0f} to {pair.end:.0f} s after the start"


def change(row: Row) -> str:
    """Return the difference in per cent or, where that has no meaning, in its unit."""
    if row.relative is not None:
        return f"{100 * row.relative.value:+.2f} %"
    return f"{row.difference.value:+.4g}"


def bounds(row: Row) -> str:
    """Return the interval of the difference, in the form of ``change``."""
    interval, factor, unit = (row.relative, 100.0, " %") if row.relative is not None else (row.difference, 1.0, "")
    if interval.low is None or interval.high is None:
        return "" if row.outcome is Outcome.SINGLE else "too few readings"
    return f"{number(factor * interval.low, 3, '+')} to {number(factor * interval.high, 3, '+')}{unit}"


def sentence(row: Row, letter: str) -> str:
    """Return the result in words: "B uses 7.5 % less memory (6.9 to 8.1)"."""
    measure = row.measure
    interval, factor, unit = (
        (row.relative, 100.0, " %") if row.relative is not None else (row.difference, 1.0, measure.unit)
    )
    unit = f" {unit.strip()}" if unit.strip() else ""
    word = measure.lower if interval.value < 0 else measure.higher
    amount = f"{_digits(abs(factor * interval.value))}{unit}"
    if interval.low is None or interval.high is None:
        return f"{letter} {measure.verb} {amount} {word} {measure.noun}, but these are too few readings to tell that from chance"
    if row.outcome is Outcome.NONE_SHOWN:
        extent = " to ".join(number(factor * bound, 2, "+") for bound in (interval.low, interval.high))
        if not _is_one_sided(row):
            return f"no difference in {measure.noun} that these data show ({extent}{unit})"
        share = number(100 * max(row.lower_share, row.higher_share), 3)
        return (
            f"{letter} {measure.verb} {amount} {word} {measure.noun} on average, and {word} in {share} % of the stretch, but too few of "
            f"these readings are independent to exclude chance ({extent}{unit}): compare more runs of each"
        )
    low, high = sorted((abs(factor * interval.low), abs(factor * interval.high)))
    return f"{letter} {measure.verb} {amount} {word} {measure.noun} ({_digits(low)} to {_digits(high)})"


def _is_one_sided(row: Row) -> bool:
    """Whether nearly all parts have the sign of the mean difference: the interval is wide where neighbouring differences are correlated."""
    return (row.lower_share if row.difference.value < 0 else row.higher_share) >= NEARLY_ALL


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


def broken_lines(found: Sequence[Broken]) -> list[str]:
    """Return a line for each condition that holds."""
    return [f"{one.condition.text}: {sentence(one.row, one.letter)}" for one in found]
