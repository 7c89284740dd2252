"""Finds the saves of a run with the best scores so far, which must reach storage although most snapshots need not. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class TopScores:
    """The ``keep`` best scores offered so far, by the identity of their saves; of equal ones the newer is better."""

    def __init__(self, attribute: str, *, order: str, keep: int) -> None:
        self.attribute = attribute
        self._sign = 1.0 if order == "max" else -1.0
        self._keep = keep
        self._best: list[tuple[float, int]] = []  # score (greater is better) and identity, the worst first

    def offer(self, word: int, score: float | None) -> tuple[bool, int]:
        """Add a save; return whether it is now among the best, and the identity of the one that it replaced (0: none)."""
        if score is None or not math.isfinite(score):
            return False, 0
        self._best = sorted([*(item for item in self._best if item[1] != word), (self._sign * score, word)])
        replaced = 0
        if len(self._best) > self._keep:
            replaced = self._best.pop(0)[1]
        return replaced != word, replaced if replaced != word else 0

    def learn(self, scored: Iterable[tuple[int, float | None]]) -> None:
        """Add the saves of earlier attempts."""
        for word, score in scored:
            self.offer(word, score)
