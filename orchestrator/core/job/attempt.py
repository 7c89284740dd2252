"""Parts of a job's record: an attempt, how its ranks ended, a requested stop, and counters of the attempts that it no longer lists.

A job may restart thousands of times, and its record is rewritten with every event. The record lists the last
``KEPT_ATTEMPTS`` attempts, and has only counters of earlier ones. The events have every attempt in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, overload

from msgspec.structs import replace

from orchestrator.core import events as ev
from orchestrator.core.codec import Integer, Number, Record, Time, from_plain, use_form
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


KEPT_ATTEMPTS: Final = 10
"""How many attempts a record lists, the current one included; `orch status JOB` shows as many."""


class Past(Record):
    """Counters over some attempts of a job, from its first one on. Times are seconds since the epoch.

    ``ordered_at`` is when the first attempt was ordered, ``running_at`` when all ranks of one were up for the first time.
    ``recoveries`` counts attempts that reached a new step after one that failed, ``recovery_seconds`` is what they took
    from the failure to that step, all together; ``ran_seconds`` is how long all ranks were up.
    """

    attempts: Integer = 0
    first_ranks: Integer = 0
    most_ranks: Integer = 0
    ordered_at: Time | None = None
    running_at: Time | None = None
    first_step_at: Time | None = None
    steps_lost: Integer = 0
    recoveries: Integer = 0
    recovery_seconds: Number = 0.0
    ran_seconds: Number = 0.0

    def add(self, attempt: Attempt, following: Attempt | None) -> Past:
        """Return the counters with the next attempt, and with the recovery from it by ``following``."""
        took = None if following is None else recovery_seconds(attempt, following)
        return replace(
            self,
            attempts=self.attempts + 1,
            first_ranks=self.first_ranks or attempt.ranks,
            most_ranks=max(self.most_ranks, attempt.ranks),
            ordered_at=attempt.started_at if self.ordered_at is None else self.ordered_at,
            running_at=attempt.running_at if self.running_at is None else self.running_at,
            first_step_at=attempt.first_step_at if self.first_step_at is None else self.first_step_at,
            steps_lost=self.steps_lost + attempt.steps_lost,
            recoveries=self.recoveries + (took is not None),
            recovery_seconds=self.recovery_seconds + (took or 0.0),
            ran_seconds=self.ran_seconds + running_seconds(attempt, attempt.ended_at),
        )

    def add_all(self, attempts: tuple[Attempt, ...]) -> Past:
        """Return the counters with these attempts, which are the job's last."""
        past = self
        for number, attempt in enumerate(attempts, start=1):
            past = past.add(attempt, attempts[number] if number < len(attempts) else None)
        return past


def running_seconds(attempt: Attempt, until: float | None) -> float:
    """Return how long all ranks of an attempt were up, up to ``until`` if it has not ended."""
    ended = until if attempt.ended_at is None else attempt.ended_at
    return 0.0 if attempt.running_at is None or ended is None else max(0.0, ended - attempt.running_at)


def recovery_seconds(failed: Attempt, following: Attempt) -> float | None:
    """Return the seconds from an attempt's failure to the first new step of the next one; None without either."""
    if failed.failure is None or failed.ended_at is None or following.first_step_at is None:
        return None
    return max(0.0, following.first_step_at - failed.ended_at)  # not by the same clock, if that stepped in between


def shorten(past: Past, attempts: tuple[Attempt, ...]) -> tuple[Past, tuple[Attempt, ...]]:
    """Move attempts beyond ``KEPT_ATTEMPTS`` to the counters."""
    while len(attempts) > KEPT_ATTEMPTS:
        past, attempts = past.add(attempts[0], attempts[1]), attempts[1:]
    return past, attempts
