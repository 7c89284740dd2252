"""The best trials of a search, and the time that a matrix's remaining jobs take. Pure; imports nothing heavy: the daemon asks for each view."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def best_trials(given: Mapping[int, Sequence[float]], orders: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the trials on the Pareto front, by the first objective; ``given`` has all that count."""
    signed = {
        number: tuple(-v if order == "max" else v for v, order in zip(values, orders, strict=True))
        for number, values in given.items()
    }
    front = [n for n, own in signed.items() if not any(_beats(other, own) for other in signed.values())]
    if len(orders) == 1:
        return tuple(sorted(front)[:1])
    return tuple(sorted(front, key=lambda number: signed[number]))


def _beats(other: Sequence[float], own: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(other, own, strict=True)) and tuple(other) != tuple(own)


def time_left(running: Sequence[float], waiting: Sequence[float], at_once: int) -> float:
    """Return seconds until the last job ends: ``running`` are remaining times, each job of ``waiting`` starts when another ends.

    ``at_once`` is the largest number of jobs that run at a time.
    """
    ends: list[float] = []
    for seconds in running:
        heappush(ends, max(0.0, seconds))
    last = max(ends, default=0.0)
    for seconds in waiting:
        begin = heappop(ends) if len(ends) >= max(1, at_once) else 0.0
        heappush(ends, begin + max(0.0, seconds))
        last = max(last, begin + max(0.0, seconds))
    return last
