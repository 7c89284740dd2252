"""A history: the steps of a seed. Each step has its own random numbers, so that a step can be left out without changing the others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DICE_BITS = 32


@dataclass(frozen=True, slots=True)
class Step:
    """The name of an act, and the seed of its choices."""

    act: str
    dice: int

    def choices(self) -> random.Random:
        return random.Random(self.dice)


@dataclass(frozen=True, slots=True)
class History:
    """The steps of a seed."""

    seed: int
    steps: tuple[Step, ...]


def draw(seed: int, length: int, weights: Mapping[str, float]) -> History:
    """Return the history of a seed. A longer one begins with the steps of a shorter one."""
    dice = random.Random(seed)
    dice.random()  # unused: the seeds of the committed results keep their histories
    # Each history prefers some kinds of acts: an act that is rare on average is frequent in a few histories.
    liked = {name: weight * 4.0 ** dice.uniform(-1.5, 1.5) for name, weight in sorted(weights.items())}
    names, chances = list(liked), list(liked.values())
    steps = [Step("submit", dice.getrandbits(DICE_BITS))]
    for _ in range(length - 1):
        (name,) = dice.choices(names, chances)
        steps.append(Step(name, dice.getrandbits(DICE_BITS)))
    return History(seed, tuple(steps))
