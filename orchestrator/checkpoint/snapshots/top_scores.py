"""Which saves of a run are among its best so far: what has to reach storage although most snapshots need not. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class TopScores:
    """The ``keep`` best of all scores offered so far, by the identity of their saves; of equal ones the newer is better."""

    def __init__(self, attribute: str, *, order: str, keep: int) -> None:
        self.attribute = attribute
        self._sign = 1.0 if order == "max" else -1.0
        self._keep = keep
        self._best: list[tuple[float, int]] = []  # score (greater is better) and identity, the worst first

    def offer(self, word: int, score: float | None) -> tuple[bool, int]:
        """Take a save in; whether it is among the best now, and the identity of the one that it replaced (0: none)."""
        if score is None or not math.isfinite(score):
            return False, 0
        self._best = sorted([*(item for item in self._best if item[1] != word), (self._sign * score, word)])
        replaced = 0
        if len(self._best) > self._keep:
            replaced = self._best.pop(0)[1]
        return replaced != word, replaced if replaced != word else 0

    def forget(self, word: int) -> None:
        """A save that was offered does not count after all."""
        self._best = [item for item in self._best if item[1] != word]

    def learn(self, scored: Iterable[tuple[int, float | None]]) -> None:
        """Take in what earlier attempts have saved."""
        for word, score in scored:
            self.offer(word, score)
