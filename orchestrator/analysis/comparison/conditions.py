"""``--fail-if "memory>+5%"``: conditions on a comparison, for CI."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.analysis.comparison.comparing import CompareError, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.analysis.comparison.comparing import Comparison, Row

_FORM: Final = re.compile(
    r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(%?)\s*", re.ASCII
)
_COMPARED: Final = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
MOST_CHARACTERS: Final = 200


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
    match = _FORM.fullmatch(text) if len(text) <= MOST_CHARACTERS else None
    if match is None:
        raise CompareError(
            f"{text[:MOST_CHARACTERS]!r} is not a condition; write METRIC>+5%, METRIC<-0.1 or the like, for example memory>+5%"
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
