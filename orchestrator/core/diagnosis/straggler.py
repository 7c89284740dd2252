"""Which rank holds the others up, and by what factor: judged by each rank's own time for a step, waiting left out.

Ranks that meet in a collective at every step all take as long as the slowest one, so the length of a step identifies no rank.
What names the slow one is the time that a rank spends on its own work in a step: getting the batch and going forward as
the training system measures it, else the processor time of its training thread. Pure; knows no clock and no process.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_FACTOR: Final = 1.15
"""A rank that takes less than this many times what the others take is no straggler."""
APART_FACTOR: Final = 1.5
"""The same for whole steps, which differ a little between ranks that wait for each other: saves are no part of them."""
LEAST_SHARE: Final = 0.1
"""What a rank takes longer than the others has to be this share of a step: less has no effect."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank: ``factor`` times the seconds that the median of the other ranks takes (``usual_seconds``)."""

    rank: int
    factor: float
    seconds: float
    usual_seconds: float


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


def find_straggler(ranks: Sequence[Pace]) -> Straggler | None:
    """The rank that the others wait for; None when there are fewer than two, or they take about the same.

    Ranks whose steps take very different times do not wait for each other at every step: there the step times tell, too.
    """
    steps = [pace.step_seconds for pace in ranks if pace.step_seconds is not None]
    least_seconds = LEAST_SHARE * max(steps, default=0.0)
    own = _slowest([(pace.rank, pace.own_seconds) for pace in ranks], LEAST_FACTOR, least_seconds)
    return own or _slowest([(pace.rank, pace.step_seconds) for pace in ranks], APART_FACTOR, 0.0)


def _slowest(
    measured: Sequence[tuple[int, float | None]], least_factor: float, least_seconds: float
) -> Straggler | None:
    known = [(seconds, rank) for rank, seconds in measured if seconds is not None]
    if len(known) < max(2, len(measured)):
        return None
    seconds, rank = max(known, key=lambda pair: (pair[0], -pair[1]))
    usual = median(value for value, other in known if other != rank)
    if usual <= 0 or seconds / usual < least_factor or seconds - usual < least_seconds:
        return None
    return Straggler(rank=rank, factor=seconds / usual, seconds=seconds, usual_seconds=usual)
