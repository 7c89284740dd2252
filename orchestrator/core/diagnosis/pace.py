"""How long each rank takes for a step, and what of it is its own work: waiting for the other ranks is left out.

Ranks that meet in a collective at every step all take as long as the slowest one, so the length of a step identifies no rank.
What names the slow one is the time that a rank spends on its own work in a step: getting the batch and going forward as
the training system measures it, else the processor time of its training thread. Pure; knows no clock and no process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

APART: Final = ("data_seconds", "forward_seconds")
"""The parts of a step in which no rank waits for another; backward passes exchange gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank's mean seconds for a step, and of these what it worked itself; None where that is not known.

    ``own_seconds`` of the ranks of a job have to be measured alike: see ``paces``.
    """

    rank: int
    step_seconds: float | None = None
    own_seconds: float | None = None


def paces(
    steps: Mapping[int, float | None], parts: Mapping[int, Mapping[str, float]], busy: Mapping[int, float | None]
) -> tuple[Pace, ...]:
    """Each rank's pace from its seconds per step, its measured ``parts`` of a step, and its processor seconds per step.

    The parts count where every rank has told them, else the processor time where every rank has.
    """
    ranks = sorted(steps)
    told = [sum(parts.get(rank, {}).get(name, 0.0) for name in APART) for rank in ranks]
    own: list[float | None] = [*told] if all(told) else [busy.get(rank) for rank in ranks]
    whole = all(value is not None for value in own)
    return tuple(
        Pace(rank=rank, step_seconds=steps[rank], own_seconds=value if whole else None)
        for rank, value in zip(ranks, own, strict=True)
    )
