"""Finds the ranks that others wait for in collectives, from the newest call that each rank has entered. Pure.

The calls of a group pair up by their order. So a rank waits for each rank that has entered fewer calls of the group, and
two ranks never meet if their calls with the same number are different collectives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

MOST_OTHERS: Final = 3
"""Maximum number of different calls of other ranks that a finding names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The newest collective that a rank has entered. ``number`` counts the collectives of its ``group``, from 1 on.

    ``label`` names the group for users, empty for the default one. ``counts`` are how many collectives of each group the rank has entered.
    """

    name: str
    number: int
    group: int
    label: str = ""
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def call(self) -> tuple[int, int, str]:
        """Return the identity of the call: it is equal for all ranks that meet in the call."""
        return self.group, self.number, self.name


def lacks(own: Entered, other: Entered) -> bool:
    """Whether a rank has not entered the call in which another one may wait; False if it is not in the group."""
    count = own.counts.get(other.group, 0 if not other.label else None)
    return count is not None and count < other.number


def awaited_by(rank: int, entered: Mapping[int, Entered]) -> list[int]:
    """Return the ranks that have entered a call that ``rank`` has not, in order."""
    own = entered.get(rank)
    return [] if own is None else [other for other in sorted(entered) if lacks(own, entered[other])]


def most_awaited(ranks: Collection[int], entered: Mapping[int, Entered]) -> int:
    """Return the rank that the most other ranks wait for; the lowest of several."""
    return min(ranks, key=lambda rank: (-len(awaited_by(rank, entered)), rank))


def odd_one(entered: Mapping[int, Entered]) -> int | None:
    """Return the rank that is in another call than the ranks that wait for it; None where the calls fit together."""
    late = most_awaited(entered, entered)
    if awaited_by(late, entered):
        return late
    same = Counter(one.call for one in entered.values())
    places = Counter(call[:2] for call in same)
    unlike = [rank for rank, one in entered.items() if places[one.call[:2]] > 1]
    return min(unlike, key=lambda rank: (same[entered[rank].call], rank), default=None)


def others_than(rank: int, entered: Mapping[int, Entered], ranks: Collection[int]) -> Iterator[int]:
    """Yield the first rank in each different call of ``ranks``, except for the call of ``rank``."""
    known = {entered[rank].call} if rank in entered else set()
    for other in sorted(ranks):
        if other in entered and entered[other].call not in known and len(known) <= MOST_OTHERS:
            known.add(entered[other].call)
            yield other
