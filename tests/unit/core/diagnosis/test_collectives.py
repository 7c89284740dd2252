"""Tables of calls: the rank in another collective call than the others, and the rank that the others wait for."""

from __future__ import annotations

import pytest

from orchestrator.core.diagnosis.health import Call, Entered, RankLook, Wait, judge, odd_one
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.hangs import Sign
from tests.support.records import replace
from tests.unit.core.diagnosis.test_health import ALL_REDUCE, BACKWARD, BROADCAST, LOCK, how, look, pair

WORLD, OTHER = 11, 22


def entered(name: str = "all_reduce", number: int = 41, group: int = WORLD, label: str = "", **counts: int) -> Entered:
    known = {WORLD: counts.get("world", number if group == WORLD else 0), group: number}
    return Entered(name=name, number=number, group=group, label=label, counts=known)


SAME = entered()
SUBGROUP = entered(number=1, group=OTHER, label="ranks 1,2", world=40)


@pytest.mark.parametrize(
    ("calls", "odd"),
    [
        ([SAME, SAME, SAME], None),
        ([SAME, entered("broadcast"), SAME], 1),
        ([entered("broadcast"), SAME], 0),
        ([SAME, SAME, entered(number=40)], 2),
        ([SAME, SUBGROUP, SAME], 1),
        ([entered(number=7, group=OTHER, label="ranks 0,1", world=41), SAME], None),
        ([entered(number=7, group=OTHER, label="a", world=9), entered(number=7, group=33, label="b", world=9)], None),
        ([SAME, Entered(name="barrier", number=1, group=OTHER, label="tp")], 1),
    ],
    ids=[
        "the same",
        "another collective",
        "of two ranks the first",
        "one call less",
        "another group",
        "groups within a group",
        "groups beside each other",
        "none of the default group",
    ],
)
def test_a_rank_is_named_only_where_calls_cannot_meet(calls: list[Entered], odd: int | None) -> None:
    assert odd_one(dict(enumerate(calls))) == odd


def at(rank: int, call: Entered | None, **changes: object) -> tuple[RankLook, RankLook]:
    return pair(replace(look(rank, ALL_REDUCE), entered=call, **changes))  # type: ignore[arg-type]


def test_two_calls_of_the_same_collective_are_told_apart_by_their_group_and_number() -> None:
    found = judge({0: at(0, SAME), 1: at(1, SUBGROUP), 2: at(2, SAME)}, range(3), how())
    assert (found.call, found.rank, found.seen.sign) == (Call.HUNG, 1, Sign.MISMATCH)
    assert found.seen.sentence() == (
        "rank 1 is in all_reduce #1 of group ranks 1,2 (step (train.py:12)) and rank 0 in all_reduce #41"
        " (step (train.py:12)): they wait for each other"
    )
    assert fact_from(found.seen.to_dict()) == found.seen
    together = judge({0: at(0, SAME), 1: at(1, SAME)}, range(2), how())
    assert together.seen.sentence().startswith("every rank waits in all_reduce #41 (step")
    unknown = judge({0: at(0, SAME), 1: at(1, None)}, range(2), how())
    assert (unknown.seen.sign, unknown.seen.calls) == (Sign.COLLECTIVE, ())
    moving = {0: at(0, SAME), 1: (at(1, SAME)[0], at(1, SUBGROUP)[1])}
    assert judge(moving, range(2), how()).seen.rank is None, "a call that changes between two looks is no evidence"


def test_other_collectives_are_named_with_their_numbers_where_the_stacks_agree_with_the_counts() -> None:
    other = pair(replace(look(1, BROADCAST), entered=entered("broadcast")))
    found = judge({0: at(0, SAME), 1: other, 2: at(2, SAME)}, range(3), how())
    assert found.seen.sentence().startswith("rank 1 is in broadcast #41 (step (train.py:12)) and rank 0 in all_re")
    backward = pair(replace(look(1, BACKWARD), entered=SAME))
    found = judge({0: at(0, entered(number=42)), 1: backward, 2: at(2, entered(number=42))}, range(3), how())
    assert found.seen.calls == (), "the exchange of gradients is not counted"
    assert found.seen.sentence().startswith("rank 1 waits in the exchange of gradients while others wait in all_reduce")


def test_of_ranks_that_wait_outside_or_spin_the_one_is_named_for_which_others_wait() -> None:
    late = entered(number=40)
    waiting = {"wait": Wait.OUTSIDE}
    pairs = {rank: pair(replace(look(rank, LOCK, **waiting), entered=SAME)) for rank in (0, 1)}  # type: ignore[arg-type]
    pairs[2] = pair(replace(look(2, LOCK, **waiting), entered=late))  # type: ignore[arg-type]
    found = judge(pairs, range(3), how())
    assert (found.call, found.rank, found.seen.sign) == (Call.SLOW, 2, Sign.OUTSIDE)
    assert found.seen.sentence().endswith("; rank 0 in all_reduce #41 (pull (data.py:7)): they wait for it")
    spinning = {rank: pair(replace(look(rank), entered=SAME), cpu=1.0) for rank in (0, 1)}
    spinning[2] = pair(replace(look(2), entered=late), cpu=1.0)
    found = judge(spinning, range(3), how())
    assert (found.rank, found.seen.sign, len(found.seen.calls)) == (2, Sign.SPINS, 1)
    spinning[2] = pair(replace(look(2), entered=entered("barrier")), cpu=1.0)
    found = judge(spinning, range(3), how(still=600.0))
    assert (found.call, found.rank, found.seen.sign) == (Call.SLOW, 2, Sign.MISMATCH)
