"""Parts of a job's record: an attempt, how its ranks ended, and a requested stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import overload

from orchestrator.core import events as ev
from orchestrator.core.codec import Integer, Record, Time, from_plain, use_form
from orchestrator.core.facts.fact import Fact
from orchestrator.core.states import AttemptState, StopPurpose


class Exits(Sequence["ev.Exit"]):
    """Ends of ranks of the current attempt, in the order of the reports; at most one end of each rank.

    It is immutable: ``and_then`` returns another one, in constant time, because both share one list of which each shows
    its own part.
    """

    __slots__ = ("_index", "_length", "_shared")

    def __init__(self, exits: Iterable[ev.Exit] = ()) -> None:
        self._index: dict[int, int] = {}
        self._shared: list[ev.Exit] = []
        for each in exits:
            if self._index.setdefault(each.rank, len(self._shared)) == len(self._shared):
                self._shared.append(each)
        self._length = len(self._shared)

    def has(self, rank: int) -> bool:
        """Whether the rank's end is included."""
        return self._index.get(rank, self._length) < self._length

    def and_then(self, end: ev.Exit) -> Exits:
        """Return these, and the end of a rank that is not included yet."""
        if self._length and self._length == len(self._shared):
            longer = object.__new__(Exits)
            longer._index, longer._shared = self._index, self._shared
        else:  # the list has another end after this part of it
            longer = Exits(self)
        longer._index[end.rank] = len(longer._shared)
        longer._shared.append(end)
        longer._length = self._length + 1
        return longer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ev.Exit]:
        return islice(self._shared, self._length)

    @overload
    def __getitem__(self, index: int) -> ev.Exit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ev.Exit, ...]: ...
    def __getitem__(self, index: int | slice) -> ev.Exit | tuple[ev.Exit, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Exits | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Exits({list(self)!r})"


class Attempt(Record):
    """One attempt, current or past. ``ranks`` is its size: that of an elastic job may change between attempts.

    ``progressed``: it has saved a checkpoint that is newer than its first one.
    """

    number: Integer
    gang: Integer
    state: AttemptState
    started_at: Time
    running_at: Time | None = None
    ended_at: Time | None = None
    first_step_at: Time | None = None
    first_step: Integer | None = None
    steps_lost: Integer = 0
    start_step: Integer = 0
    checkpoint_step: Integer = 0
    failure: ev.Failure | None = None
    ranks: Integer = 0
    progressed: bool = False


class Stop(Record):
    """A requested stop."""

    purpose: StopPurpose
    by: Fact
    at: Time
    deadline: Time


use_form(Exits, tuple, lambda ends: Exits(from_plain(tuple[ev.Exit, ...], ends)))
