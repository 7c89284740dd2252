"""Detects memory that grows steadily over minutes: a leak, and not a filling cache or batches of varied length. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from orchestrator.core import thresholds as d

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Steady growth: the use at its end, and its rate."""

    used: float
    per_second: float


class GrowthWindow:
    """The maximum use in each of the newest ``slots`` of equal length. A pause of the observer begins a new series."""

    def __init__(self, slots: int = d.GROWTH_SLOTS, seconds: float = d.GROWTH_SLOT_SECONDS) -> None:
        self._most = slots
        self._seconds = seconds
        self._slots: deque[tuple[int, float]] = deque(maxlen=slots + 2)

    def add(self, clock: float, used: float) -> None:
        """Add a value; ``clock`` counts observed seconds."""
        slot = int(clock // self._seconds)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, max(used, self._slots[-1][1]))
            return
        if self._slots and self._slots[-1][0] != slot - 1:
            self._slots.clear()
        self._slots.append((slot, used))

    def growth(self) -> Growth | None:
        """Return the growth over the completed slots, where it is steady."""
        over = [used for _, used in self._slots][:-1]
        if len(over) <= self._most or not _is_steady(over):
            return None
        seconds = self._seconds * (len(over) - 1)
        return Growth(used=over[-1], per_second=(over[-1] - over[0]) / seconds)


def _is_steady(values: Sequence[float]) -> bool:
    changes = [later - earlier for earlier, later in pairwise(values)]
    half = len(changes) // 2
    earlier, later = sum(changes[:half]), sum(changes[-half:])
    grew = sum(change > 0.0 for change in changes)
    return min(changes) >= 0.0 and grew >= d.GROWING_SHARE * len(changes) and later >= d.STEADY_GROWTH * earlier
