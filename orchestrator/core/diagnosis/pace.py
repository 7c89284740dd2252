"""Computes how long each rank takes for a step, and how much of that is its own work, without waits for other ranks.

Ranks that meet in a collective at every step all take as long as the slowest one, so the length of a step identifies no
rank. The slow one is identified by its own work in a step: getting the batch and the forward pass as the training
system measures them, else the processor time of its training thread. Pure; uses no clock and no process.
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
    """One rank's mean seconds for a step, and its own work in them; None where that is unknown.

    ``own_seconds`` of a job's ranks must be measured in the same way: see ``paces``.
    """

    rank: int
    step_seconds: float | None = None
    own_seconds: float | None = None


def paces(
    steps: Mapping[int, float | None], parts: Mapping[int, Mapping[str, float]], busy: Mapping[int, float | None]
) -> tuple[Pace, ...]:
    """Return each rank's pace from its seconds per step, its measured ``parts`` of a step, and its processor seconds per step.

    The parts count where every rank has reported them, else the processor time where every rank has.
    """
    ranks = sorted(steps)
    measured = [sum(parts.get(rank, {}).get(name, 0.0) for name in APART) for rank in ranks]
    own: list[float | None] = [*measured] if all(measured) else [busy.get(rank) for rank in ranks]
    whole = all(value is not None for value in own)
    return tuple(
        Pace(rank=rank, step_seconds=steps[rank], own_seconds=value if whole else None)
        for rank, value in zip(ranks, own, strict=True)
    )
