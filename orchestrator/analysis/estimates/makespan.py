"""Estimates how long several jobs take if a limited number runs at a time. Pure."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
