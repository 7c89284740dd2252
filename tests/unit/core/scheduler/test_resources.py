"""What is remembered of free resources agrees with a new count, whatever was changed and undone."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.cluster import Free
from orchestrator.core.scheduler.placement import FreeNodes, capacity, claim, free_on, give_back, place, take
from tests.unit.core.builders import make_spec, node, nodes, pending

NODES = nodes(*(node(name, gpus=gpus, cpus=16) for name, gpus in zip("abcdef", (8, 8, 4, 2, 0, 8), strict=True)))
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


def same(kept: FreeNodes, gang: object) -> None:
    anew = FreeNodes({name: left.copy() for name, left in kept.items()})
    assert place(gang, kept, NODES) == place(gang, anew, NODES)  # type: ignore[arg-type]
    assert capacity(gang, kept, NODES) == capacity(gang, anew, NODES)  # type: ignore[arg-type]
    assert kept.sums() == anew.sums()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_remembered_says_what_counting_anew_says(seed: int) -> None:
    choose = random.Random(seed)
    free, plain = free_on(NODES.values(), ()), free_on(NODES.values(), ())
    held: list[tuple[object, tuple[str, ...]]] = []
    for number in range(40):
        workers, strategy = choose.choice([1, 2, 3, 9, 14]), choose.choice(STRATEGIES)
        gang = pending(
            make_spec(workers=workers, gpu=choose.choice([0, 1, 2]), strategy=strategy), job_id=f"job-{number}"
        )
        same(free, gang)
        where = place(gang, free, NODES)
        free.begin()
        assert claim(gang, free, NODES) == claim(gang, plain.copy(), NODES)
        free.begin()
        claim(pending(make_spec(workers=30)), free, NODES)
        same(free, gang)
        free.restore()
        free.restore()
        assert dict(free) == dict(plain)
        same(free, gang)
        if where is not None:
            for one in (free, plain):
                take(gang, where, one)  # type: ignore[arg-type]
            held.append((gang, where))
        elif held:
            gang, where = held.pop(choose.randrange(len(held)))  # type: ignore[assignment]
            for one in (free, plain):
                give_back(gang, where, (None,) * len(where), one)


def test_nodes_come_and_go() -> None:
    free, gang = free_on(NODES.values(), ()), pending(make_spec(workers=8))
    assert place(gang, free, NODES) == ("a",) * 8
    free.put("a", None)
    assert place(gang, free, NODES) == ("b",) * 8
    free.put("a", Free(cpus=16, idle_gpus=8, memory_bytes=2**38))
    assert (place(gang, free, NODES), free.sums().gpus) == (("a",) * 8, 30)
    for cpu in range(1, 80):  # more shapes than are remembered
        place(pending(make_spec(workers=1, cpu=cpu)), free, NODES)
    assert place(gang, free, NODES) == ("a",) * 8
