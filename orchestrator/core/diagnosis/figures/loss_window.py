"""Determines from a loss's newest values whether it still changes, and whether it has jumped. Pure.

The usual value is the median of the window, with its robust deviation, so that single bad batches change nothing;
newest values far above it are not added to the window.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.definitions import DEFINITIONS
from orchestrator.core.facts.findings import LossJumped

MAD_TO_DEVIATION: Final = 1.4826
"""The median absolute deviation of a normal distribution, times this, is its standard deviation."""
HIGH: Final = 0.9
"""After a jump, every one of the newest values is above this quantile of the window."""
MOST_BEFORE: Final = 2
"""A loss varies, and has not jumped, where more than this many spans of values in the window reached half of the jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """A loss: its newest value, and for how many steps and seconds it has not changed.

    ``usual_steps`` is the longest earlier run of steps without a change, None before three changes. ``jump`` is the
    newest values' excess over the ``usual`` one, divided by the least excess of a jump; None while too little is known.
    """

    metric: str
    value: float
    steps: int
    seconds: float
    usual_steps: int | None
    changed: bool
    usual: float = 0.0
    now: float = 0.0
    jump: float | None = None


class LossWindow:
    """Newest values of one metric; begins with its first value."""

    def __init__(self, metric: str, value: float, step: int, at: float) -> None:
        self._metric, self._value, self._step, self._at = metric, value, step, at
        self._changes = self._longest = 0
        self._usual: deque[float] = deque(maxlen=d.LOSS_WINDOW)
        self._newest: deque[float] = deque(maxlen=d.JUMPED_VALUES)
        self._held: deque[float] = deque(maxlen=d.LOSS_WINDOW)
        self._jumped: tuple[float | None, float, float] = (None, 0.0, 0.0)
        self._note(value)

    def add(self, value: float, step: int, at: float) -> None:
        """Add the value reported at ``step``."""
        if value == self._value:
            return
        self._longest = max(self._longest, step - self._step) if self._changes else 0
        self._changes += 1
        self._value, self._step, self._at = value, step, at
        self._note(value)

    def figures(self, step: int, now: float) -> LossFigures:
        """Return the figures at ``step``."""
        jump, usual, newest = self._jumped
        return LossFigures(
            metric=self._metric,
            value=self._value,
            steps=max(0, step - self._step),
            seconds=now - self._at,
            usual_steps=self._longest if self._changes >= 3 else None,
            changed=self._changes > 0,
            usual=usual,
            now=newest,
            jump=jump,
        )

    def _note(self, value: float) -> None:
        if not math.isfinite(value):
            return
        if len(self._newest) == d.JUMPED_VALUES:
            self._held.append(self._newest[0])
        self._newest.append(value)
        self._jumped = self._jump()
        jump = self._jumped[0]
        if jump is None or jump < DEFINITIONS[LossJumped].closes_at or len(self._held) >= d.JUMP_ENDS_AFTER:
            self._usual.extend(self._held)
            self._held.clear()

    def _jump(self) -> tuple[float | None, float, float]:
        """Return the newest value's excess over the usual one in units of the least jump, the usual value, the newest."""
        if len(self._usual) < d.LEAST_LOSSES or len(self._newest) < d.JUMPED_VALUES:
            return None, 0.0, 0.0
        ordered = sorted(self._usual)
        usual = median(ordered)
        deviation = MAD_TO_DEVIATION * median(abs(value - usual) for value in ordered)
        newest = median(self._newest)
        least = max(d.JUMPED_DEVIATIONS * deviation, d.JUMPED_FACTOR * abs(usual))
        if least <= 0.0 or min(self._newest) <= ordered[int(HIGH * (len(ordered) - 1))]:
            return 0.0, usual, newest
        values, half = list(self._usual), (usual + newest) / 2.0
        spans = (values[start : start + d.JUMPED_VALUES] for start in range(0, len(values), d.JUMPED_VALUES))
        if sum(median(span) >= half for span in spans) > MOST_BEFORE:
            return 0.0, usual, newest
        return (newest - usual) / least, usual, newest
