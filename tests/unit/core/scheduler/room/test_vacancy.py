"""The index of free resources agrees with a new count, whatever was changed and undone."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.cluster import Free
from orchestrator.core.scheduler.placement import capacity, claim, free_on, give_back, place, take
from orchestrator.core.scheduler.room.vacancy import MOST_INDEXES, Slots, Vacancy
from tests.support.work import calls
from tests.unit.core.builders import make_spec, node, nodes, pending

NODES = nodes(*(node(name, gpus=gpus, cpus=16) for name, gpus in zip("abcdef", (8, 8, 4, 2, 0, 8), strict=True)))
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


def same(vacancy: Vacancy, gang: object, plain: dict[str, Free]) -> None:
    assert dict(vacancy) == plain
    assert place(gang, vacancy, NODES) == place(gang, plain, NODES)  # type: ignore[arg-type]
    assert capacity(gang, vacancy, NODES) == capacity(gang, plain, NODES)  # type: ignore[arg-type]
    assert vacancy.sums()[1:] == (
        sum(left.idle_gpus for left in plain.values()),
        sum(max(0.0, left.cpus) for left in plain.values()),
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_kept_index_says_what_counting_anew_says(seed: int) -> None:
    choose = random.Random(seed)
    vacancy, plain = Vacancy(free_on(NODES.values(), ())), free_on(NODES.values(), ())
    held: list[tuple[object, tuple[str, ...]]] = []
    for number in range(40):
        workers, strategy = choose.choice([1, 2, 3, 9, 14]), choose.choice(STRATEGIES)
        gang = pending(
            make_spec(workers=workers, gpu=choose.choice([0, 1, 2]), strategy=strategy), job_id=f"job-{number}"
        )
        same(vacancy, gang, plain)
        where = place(gang, vacancy, NODES)
        vacancy.begin()
        assert claim(gang, vacancy, NODES) == claim(gang, {i: left.copy() for i, left in plain.items()}, NODES)
        vacancy.begin()
        claim(pending(make_spec(workers=30)), vacancy, NODES)
        vacancy.restore()
        vacancy.restore()
        same(vacancy, gang, plain)
        if where is not None:
            for free in (vacancy, plain):
                take(gang, where, free)
            held.append((gang, where))
        elif held:
            gang, where = held.pop(choose.randrange(len(held)))  # type: ignore[assignment]
            for free in (vacancy, plain):
                give_back(gang, where, (None,) * len(where), free)


def test_nodes_come_and_go() -> None:
    vacancy = Vacancy(free_on(NODES.values(), ()))
    gang = pending(make_spec(workers=8))
    assert place(gang, vacancy, NODES) == ("a",) * 8
    vacancy.drop("a")
    assert place(gang, vacancy, NODES) == ("b",) * 8
    vacancy.put("a", Free(cpus=16, idle_gpus=8, memory_bytes=2**38))
    assert (place(gang, vacancy, NODES), vacancy.sums()[0]) == (("a",) * 8, 30)
    for workers in range(1, MOST_INDEXES + 9):
        place(pending(make_spec(workers=1, cpu=workers)), vacancy, NODES)
    assert place(gang, vacancy, NODES) == ("a",) * 8


def test_a_place_is_found_without_looking_at_every_node() -> None:
    def work(count: int) -> int:
        known = nodes(*(node(f"node-{n:05}", gpus=8) for n in range(count)))
        vacancy, gang = Vacancy(free_on(known.values(), ())), pending(make_spec(workers=3))
        place(gang, vacancy, known)

        def one() -> None:
            where = place(gang, vacancy, known)
            assert where is not None
            take(gang, where, vacancy)

        return calls(one)

    assert work(2000) == work(20)


def test_slots_are_in_order_of_room_then_id() -> None:
    slots = Slots()
    for name, count in (("c", 2), ("a", 2), ("b", 5), ("d", 1), ("b", 3), ("e", 4), ("e", 0)):
        slots.put(name, count)
    assert (list(slots.roomiest()), slots.total, slots.most) == (["b", "a", "c", "d"], 8, 3)
    assert [slots.tightest(ranks) for ranks in (1, 2, 3, 4)] == ["d", "a", "b", None]
