"""Formats a comparison as text: a table of figures, and a sentence for each difference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.analysis.comparison.alignment import Align
from orchestrator.analysis.comparison.comparing import LETTERS, Outcome
from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.analysis.comparison.comparing import Comparison, Pair, Row
    from orchestrator.analysis.comparison.conditions import Broken

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
        lines += ["", *_pair(pair, comparison.align)]
    return "\n".join([*lines, "", CAUTION]) + "\n"


def _pair(pair: Pair, align: Align) -> Iterator[str]:
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
