"""The ends of an attempt's ranks: an immutable sequence, extended in the same time whatever its length."""

from __future__ import annotations

from orchestrator.core.events import Exit
from orchestrator.core.job.record import Exits, Job
from orchestrator.core.lifecycle.fold import fold
from tests.support.records import replace
from tests.unit.core.builders import exited, make_spec, pending, running


def end_of(rank: int) -> Exit:
    return Exit(rank=rank, exit_code=0, signal=None, at=1.0)


def test_each_sees_what_it_had_when_it_was_made() -> None:
    one = Exits([end_of(3)])
    two = one.and_then(end_of(1))
    other = one.and_then(end_of(2))
    assert ([e.rank for e in one], [e.rank for e in two], [e.rank for e in other]) == ([3], [3, 1], [3, 2])
    assert (one.has(1), two.has(1), two.has(2), other.has(1), other.has(2)) == (False, True, False, False, True)
    assert two[-1] == end_of(1)
    assert two[:1] == (end_of(3),)


def test_a_rank_ends_once() -> None:
    again = replace(end_of(1), exit_code=4)
    assert Exits([end_of(1), end_of(2), again]) == (end_of(1), end_of(2))


def test_those_with_the_same_ends_are_equal() -> None:
    assert Exits([end_of(1)]) == Exits().and_then(end_of(1))
    assert hash(Exits([end_of(1)])) == hash(Exits().and_then(end_of(1)))
    assert Exits() == ()
    assert Exits() != [end_of(1)]


def test_the_empty_one_keeps_nothing_of_those_made_from_it() -> None:
    empty = Exits()
    assert [e.rank for e in empty.and_then(end_of(1))] == [1]
    assert [e.rank for e in empty.and_then(end_of(2))] == [2]
    assert len(empty) == 0


def test_an_attempt_of_many_ranks_is_folded_without_looking_through_those_that_ended() -> None:
    """Adding an end neither compares nor copies the earlier ones."""

    class Told(Exit):
        looked_at = 0

        def __getattribute__(self, name: str) -> object:
            Told.looked_at += name == "rank"
            return super().__getattribute__(name)

    job: Job = running(pending(make_spec(workers=64)))
    for rank in range(64):
        event = exited(job, rank)
        job = fold(job, replace(event, exit=Told(rank=rank, exit_code=0, signal=None, at=1.0)))
    assert len(job.exits) == 64
    assert Told.looked_at <= 64 * 3
