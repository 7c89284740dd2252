"""Reduces any number of readings to lines of a bounded number of points. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Final

from orchestrator.api.curve_views import ChartView, CurveView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MOST_CURVES: Final = 16
"""More GPUs or ranks than this are drawn as one line with a band."""

DIGITS: Final = 5


@dataclass(slots=True)
class Part:
    """The readings in one part of a span."""

    x: float
    total: float = 0.0
    count: int = 0
    low: float = inf
    high: float = -inf
    not_finite: int = 0

    def add(self, value: float | None) -> None:
        """Add a reading; None stands for one that was not finite."""
        if value is None or not isfinite(value):
            self.not_finite += 1
            return
        self.total += value
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)


@dataclass(frozen=True, slots=True)
class Grid:
    """``points`` parts of equal length between two ends."""

    begin: float
    end: float
    points: int

    def parts(self, readings: Iterable[tuple[float, float | None]]) -> dict[int, Part]:
        """Return the readings by part; those outside are left out."""
        found: dict[int, Part] = {}
        scale = self.points / (self.end - self.begin) if self.end > self.begin else 0.0
        for x, value in readings:
            if not self.begin <= x <= self.end:
                continue
            number = min(self.points - 1, int((x - self.begin) * scale))
            part = found.get(number)
            if part is None:
                part = found[number] = Part(x)
            part.add(value)
        return found


def curve(label: str, parts: Mapping[int, Part]) -> CurveView:
    """Return a line through the means of the parts."""
    ordered = [parts[number] for number in sorted(parts)]
    return CurveView(
        label=label,
        x=tuple(round(part.x, 3) for part in ordered),
        values=tuple(_rounded(part.total / part.count) if part.count else None for part in ordered),
        lows=tuple(_rounded(part.low) if part.count else None for part in ordered),
        highs=tuple(_rounded(part.high) if part.count else None for part in ordered),
        not_finite=sum(part.not_finite for part in ordered),
    )


def chart(
    name: str,
    unit: str,
    lines: Sequence[tuple[str, Mapping[int, Part]]],
    *,
    kind: str = "GPUs",
    most: int = MOST_CURVES,
) -> ChartView | None:
    """Return the lines that have readings; one for all of them where there are more than ``most``; None without any."""
    shown = [(label, parts) for label, parts in lines if any(part.count or part.not_finite for part in parts.values())]
    if not shown:
        return None
    if len(shown) <= most:
        return ChartView(name=name, unit=unit, curves=tuple(curve(label, parts) for label, parts in shown))
    together: dict[int, Part] = {}
    for _, parts in shown:
        for number, part in parts.items():
            _join(together.setdefault(number, Part(part.x)), part)
    label = f"mean of {len(shown)} {kind}"
    return ChartView(name=name, unit=unit, curves=(curve(label, together),), merged=len(shown))


def _join(whole: Part, part: Part) -> None:
    whole.total += part.total
    whole.count += part.count
    whole.not_finite += part.not_finite
    whole.low, whole.high = min(whole.low, part.low), max(whole.high, part.high)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
