"""Placement of gangs: every strategy, shares of GPUs, and claims that keep a big job from starving."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsNodes, NoNodeWithLabels, NotEnoughFree
from orchestrator.core.scheduler.placement import (
    LEAST_CPUS,
    claim,
    could_ever_fit,
    free_on,
    missing_nodes,
    place,
)
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.runtime.gangs.table import _bundle
from orchestrator.spec.model import CheckpointSpec
from tests.support.records import replace
from tests.unit.core.builders import (
    T0,
    after,
    changed,
    failed,
    gone,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    started,
)

if TYPE_CHECKING:
    from typing import Any

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job


def put(job: Job, *found: Node, others: tuple[Job, ...] = ()) -> tuple[str, ...] | None:
    known = nodes(*found)
    return place(job, free_on(known.values(), others), known)


def job_of(workers: int, **fields: Any) -> Job:
    return pending(make_spec(workers=workers, **fields))


A8, B8, C4 = node("a"), node("b"), node("c", gpus=4)


@pytest.mark.parametrize(
    ("strategy", "workers", "expected"),
    [
        ("PACK", 2, ("c",) * 2),
        ("PACK", 8, ("a",) * 8),
        ("PACK", 12, ("a",) * 8 + ("b",) * 4),
        ("PACK", 20, ("a",) * 8 + ("b",) * 8 + ("c",) * 4),
        ("PACK", 21, None),
        ("STRICT_PACK", 4, ("c",) * 4),
        ("STRICT_PACK", 8, ("a",) * 8),
        ("STRICT_PACK", 9, None),
        ("SPREAD", 2, ("a", "b")),
        ("SPREAD", 3, ("a", "b", "c")),
        ("SPREAD", 5, ("a", "a", "b", "b", "c")),
        ("SPREAD", 20, ("a",) * 8 + ("b",) * 8 + ("c",) * 4),
        ("SPREAD", 21, None),
        ("STRICT_SPREAD", 3, ("a", "b", "c")),
        ("STRICT_SPREAD", 4, None),
    ],
)
def test_every_strategy(strategy: str, workers: int, expected: tuple[str, ...] | None) -> None:
    assert put(job_of(workers, strategy=strategy), A8, B8, C4) == expected


def test_a_small_job_goes_to_the_fullest_node_that_holds_it() -> None:
    on_b = running(job_of(3), nodes=("b",) * 3)
    assert put(job_of(2), A8, B8, others=(on_b,)) == ("b", "b")
    assert put(job_of(6), A8, B8, others=(on_b,)) == ("a",) * 6


@pytest.mark.parametrize(
    ("worker", "fits"),
    [
        ({"gpu": 4}, 2),
        ({"gpu": 3}, 2),
        ({"gpu": 0, "cpu": 16}, 4),
        ({"gpu": 0, "cpu": 0.5}, 128),
        ({"gpu": 1, "cpu": 32}, 2),
        ({"gpu": 1, "memory_bytes": 2**37}, 2),
        ({"gpu": 0.5}, 16),
        ({"gpu": 0.4}, 16),
        ({"gpu": 0.6}, 8),
        ({"gpu": 0.3}, 24),
        ({"gpu": 0.1}, 64),
    ],
)
def test_as_many_ranks_as_the_scarcest_resource_allows(worker: dict[str, Any], fits: int) -> None:
    assert put(job_of(fits, **worker), A8) == ("a",) * fits
    assert put(job_of(fits + 1, **worker), A8) is None


def test_a_job_goes_only_to_the_nodes_that_it_names() -> None:
    assert put(job_of(2, nodes=("b",)), A8, B8) == ("b", "b")
    assert put(job_of(12, nodes=("b", "c")), A8, B8, C4) == ("b",) * 8 + ("c",) * 4
    assert put(job_of(9, nodes=("b",)), A8, B8) is None
    by_id = node("0a1b", gpus=2)
    assert put(job_of(1, nodes=("0a1b",)), A8, replace(by_id, name="gpu-7")) == ("0a1b",)
    assert not could_ever_fit(job_of(1, nodes=("b",)), nodes(A8, replace(B8, alive=False)))


def test_a_job_goes_only_to_nodes_with_all_of_its_labels() -> None:
    fast, both = replace(B8, labels={"disk": "nvme"}), replace(C4, labels={"disk": "nvme", "net": "ib"})
    assert put(job_of(2, node_labels={"disk": "nvme", "net": "ib"}), A8, fast, both) == ("c", "c")
    assert put(job_of(12, node_labels={"disk": "nvme"}), A8, fast, both) == ("b",) * 8 + ("c",) * 4
    assert put(job_of(1, node_labels={"disk": "ssd"}), A8, fast, both) is None
    assert put(job_of(1, node_labels={"disk": "nvme"}), A8) is None


def test_why_a_job_with_labels_waits() -> None:
    known = nodes(A8, replace(C4, labels={"disk": "nvme"}))
    busy = running(pending(make_spec(workers=4), job_id="busy"), nodes=("c",) * 4)
    waits = job_of(1, node_labels={"disk": "nvme"})
    lost = pending(make_spec(workers=1, node_labels={"disk": "tape"}), job_id="lost", sequence=2)
    commands = decide(State(jobs={busy.id: busy, waits.id: waits, lost.id: lost}, nodes=known), T0 + 9)
    assert commands.waiting == {
        waits.id: NotEnoughFree(gpus=1, cpus=1, free_gpus=8, free_cpus=124, labels=("disk=nvme",)),
        lost.id: NoNodeWithLabels(labels=("disk=tape",)),
    }
    down = {**known, "c": replace(known["c"], alive=False)}
    commands = decide(State(jobs={waits.id: waits}, nodes=down), T0 + 9)
    assert commands.waiting[waits.id] == AwaitsNodes(nodes=("c",), gpus=1, cpus=1)


def test_shares_of_one_gpu_are_what_earlier_shares_left() -> None:
    first = running(job_of(1, gpu=0.6), nodes=("a",))
    one = node("a", gpus=1)
    assert put(job_of(1, gpu=0.4), one, others=(first,)) == ("a",)
    assert put(job_of(1, gpu=0.5), one, others=(first,)) is None
    assert put(job_of(1, gpu=1), one, others=(first,)) is None


def sharing(shares: float, *gpus: str, job_id: str = "shares-abc234") -> Job:
    """Return a job that runs on one node with a share of each of these GPUs."""
    job = running(pending(make_spec(workers=len(gpus), gpu=shares), job_id=job_id), nodes=("a",) * len(gpus))
    seats = tuple(replace(seat, gpu_ids=(gpu,)) for seat, gpu in zip(job.seats, gpus, strict=True))
    return after(job, ev.GangPlaced(job_id=job.id, at=T0 + 3, gang=job.gang, seats=seats))


def test_two_halves_of_different_gpus_are_no_whole_one() -> None:
    two = node("a", gpus=2)
    apart, together = sharing(0.5, "0", "1"), sharing(0.5, "1", "1")
    assert free_on([two], [apart])["a"].gpus == free_on([two], [together])["a"].gpus == 1
    assert put(job_of(1), two, others=(apart,)) is None
    assert put(job_of(1), two, others=(together,)) == ("a",)
    assert put(job_of(1, gpu=0.6), two, others=(apart,)) is None
    assert put(job_of(2, gpu=0.5), two, others=(apart,)) == ("a", "a")


def test_a_share_whose_gpu_is_not_known_yet_may_lie_on_one_of_its_own() -> None:
    two = node("a", gpus=2)
    job = job_of(2, gpu=0.5)
    placed = after(job, started(job, nodes=("a", "a")))
    assert put(job_of(1), two, others=(placed,)) is None
    assert put(job_of(2, gpu=0.5), two, others=(placed,)) == ("a", "a")


def test_a_share_that_others_of_the_cluster_hold_leaves_no_whole_gpu() -> None:
    shared = node("a", gpus=2, other_gpus=0.5)
    assert put(job_of(2), shared) is None
    assert put(job_of(1), shared) == ("a",)
    assert put(job_of(3, gpu=0.5), shared) == ("a",) * 3
    assert put(job_of(4, gpu=0.5), shared) is None


@given(
    holding=st.lists(st.tuples(st.sampled_from([0.25, 0.5, 0.6]), st.integers(0, 3)), max_size=8),
    wanted=st.sampled_from([0.25, 0.5, 0.6, 1.0, 2.0]),
)
def test_what_is_placed_fits_on_the_gpus_that_there_are(holding: list[tuple[float, int]], wanted: float) -> None:
    left = [1.0] * 4
    others = []
    for number, (share, gpu) in enumerate(holding):
        if left[gpu] >= share - 1e-9:
            left[gpu] -= share
            others.append(sharing(share, str(gpu), job_id=f"shares-abc22{number + 2}"))
    each = min(wanted, 1.0)
    fit = sum(int((free + 1e-9) / each) for free in left) // max(1, round(wanted))
    four = node("a", gpus=4)
    assert fit == 0 or put(job_of(fit, gpu=wanted), four, others=tuple(others)) == ("a",) * fit
    assert put(job_of(fit + 1, gpu=wanted), four, others=tuple(others)) is None


def test_ranks_that_need_nothing_fit_anywhere_but_on_a_node_that_only_coordinates() -> None:
    assert put(job_of(3, gpu=0, cpu=0), node("a", gpus=0, cpus=1)) == ("a",) * 3
    assert put(job_of(3, gpu=0, cpu=0), node("a", gpus=0, cpus=0)) is None


@pytest.mark.parametrize(
    ("asked", "bundle"),
    [
        ({"gpu": 0, "cpu": 0}, {"CPU": LEAST_CPUS}),
        ({"gpu": 0, "cpu": 0, "memory_bytes": 5_000_000}, {"CPU": LEAST_CPUS, "memory": 5e6}),
        ({"gpu": 1, "cpu": 0}, {"GPU": 1.0}),
        ({"gpu": 0.5, "cpu": 2}, {"CPU": 2.0, "GPU": 0.5}),
    ],
)
def test_the_scheduler_sets_aside_what_ray_is_asked_for(asked: dict[str, Any], bundle: dict[str, float]) -> None:
    job = job_of(1, **asked)
    assert _bundle(job) == bundle
    whole = node("a", cpus=2, gpus=1)
    (free,) = free_on([replace(whole, memory_bytes=10_000_000)], [running(job, nodes=("a",))]).values()
    left = {"CPU": 2 - free.cpus, "GPU": 1 - free.gpus, "memory": 1e7 - free.memory_bytes}
    assert {name: amount for name, amount in left.items() if amount} == pytest.approx(bundle)


@pytest.mark.parametrize(
    ("model", "expected"), [("H100", ("a",)), ("h100", ("a",)), ("MI300X", ("b",)), ("B200", None), (None, ("a",))]
)
def test_the_model_of_the_gpu_is_asked_for_by_a_part_of_its_name(
    model: str | None, expected: tuple[str, ...] | None
) -> None:
    known = (node("a", gpu_models=("NVIDIA H100 80GB HBM3",)), node("b", gpu_models=("AMD Instinct MI300X",)))
    assert put(job_of(1, gpu_model=model), *known) == expected


@pytest.mark.parametrize("fields", [{"alive": False}, {"cordoned": True}])
def test_nodes_that_are_dead_or_cordoned_take_nothing(fields: dict[str, bool]) -> None:
    assert put(job_of(1), node("a", **fields)) is None
    assert put(job_of(1), node("a", **fields), B8) == ("b",)


def test_what_others_of_the_cluster_hold_is_not_free() -> None:
    busy = node("a", gpus=4, other_gpus=3, other_cpus=1, other_memory_bytes=5)
    assert put(job_of(1), busy) == ("a",)
    assert put(job_of(2), busy) is None
    left = free_on([busy], [])["a"]
    assert (left.gpus, left.cpus, left.memory_bytes) == (1, 63, 2**38 - 5)


def test_a_gang_holds_its_place_until_it_is_confirmed_gone() -> None:
    holder = running(job_of(8), nodes=("a",) * 8)
    recovering = after(holder, failed(holder), gone(holder))
    for job in (holder, recovering):
        assert put(job_of(1), A8, others=(job,)) is None
    assert put(job_of(1), A8, others=(after(recovering, released(recovering)),)) == ("a",)


def test_a_gang_on_a_node_that_is_away_takes_nothing_from_the_others() -> None:
    assert free_on([A8], [running(job_of(2), nodes=("b", "b"))])["a"].gpus == 8


def test_every_gang_is_whole() -> None:
    for strategy in ("PACK", "SPREAD"):
        for workers in range(1, 21):
            placed = put(job_of(workers, strategy=strategy), A8, B8, C4)
            assert placed is not None
            assert len(placed) == workers
            assert all(Counter(placed)[n.id] <= n.gpus for n in (A8, B8, C4))
            assert list(placed) == sorted(placed, key=placed.index), "ranks of one node stand together"


class TestClaim:
    """Resources that are set aside for a gang that does not fit yet."""

    def test_it_leaves_nothing_that_could_help_it(self) -> None:
        known = nodes(A8, C4)
        free = free_on(known.values(), [running(job_of(6), nodes=("a",) * 6)])
        claim(job_of(8), free, known)
        assert place(job_of(1), free, known) is None

    def test_it_leaves_what_is_left_over(self) -> None:
        known = nodes(A8, C4)
        free = free_on(known.values(), [])
        claim(job_of(10), free, known)
        assert place(job_of(2), free, known) == ("c", "c")
        assert place(job_of(3), free, known) is None

    def test_it_leaves_processors_to_jobs_without_gpus(self) -> None:
        known = nodes(A8)
        free = free_on(known.values(), [running(job_of(6), nodes=("a",) * 6)])
        claim(job_of(8), free, known)
        assert place(job_of(4, gpu=0), free, known) == ("a",) * 4

    def test_it_leaves_nodes_that_do_not_suit(self) -> None:
        known = nodes(node("a", gpu_models=("H100",)), node("b", gpu_models=("A100",)))
        free = free_on(known.values(), [])
        claim(job_of(9, gpu_model="H100"), free, known)
        assert place(job_of(8), free, known) == ("b",) * 8

    def test_pieces_too_small_for_a_rank_are_kept_for_it(self) -> None:
        known = nodes(node("a", gpus=4))
        free = free_on(known.values(), [running(job_of(1), nodes=("a",))])
        claim(job_of(1, gpu=4), free, known)
        assert place(job_of(1), free, known) is None


@pytest.mark.parametrize(
    ("workers", "fields", "fits"),
    [(8, {}, True), (9, {}, False), (1, {"gpu_model": "H100"}, False), (1, {"cpu": 65}, False)],
)
def test_whether_it_fits_when_nothing_else_runs(workers: int, fields: dict[str, Any], fits: bool) -> None:
    busy = node("a", other_gpus=8, cordoned=True)
    assert could_ever_fit(job_of(workers, **fields), nodes(busy, node("dead", alive=False))) is fits


def test_nothing_new_goes_to_a_node_that_does_not_answer() -> None:
    assert put(job_of(1), node("a", reachable=False)) is None
    assert could_ever_fit(job_of(1), nodes(node("a", reachable=False))), "it may answer again"


def test_a_node_with_files_of_its_own_takes_jobs_whose_checkpoints_outlive_it() -> None:
    apart = node("a", shares_home=False)
    assert put(job_of(1), apart) is None
    job = job_of(1, checkpoint=CheckpointSpec(storage_path="/data"))
    assert put(job, apart) == ("a",)
    assert put(changed(job, resume_from="/home/ada/.orch/jobs/x/resume"), apart) is None, "that lies in the home"
    assert put(changed(job, resume_from="s3://bucket/x"), apart) == ("a",)
    watching = CheckpointSpec(storage_path="/data", watch="out/*.pt")
    assert put(job_of(1, checkpoint=watching), apart) is None, "what it finds lies in the node's copy"


@given(
    drawn=st.lists(st.tuples(st.sampled_from([0.25, 0.5, 0.6, 0.75, 1.0, 2.0]), st.integers(1, 3)), max_size=10),
    gpus=st.integers(1, 4),
    choose=st.randoms(use_true_random=False),
)
def test_gangs_whose_gpus_are_not_known_yet_never_hold_more_than_there_is(
    drawn: list[tuple[float, int]], gpus: int, choose: random.Random
) -> None:
    there = node("a", gpus=gpus)
    held: list[Job] = []
    for number, (share, ranks) in enumerate(drawn):
        choose.shuffle(held)  # records come in no order
        asked = pending(make_spec(workers=ranks, gpu=share, cpu=0), sequence=number, job_id=f"gang-abc{number:03}")
        placed = place(asked, free_on([there], held), {"a": there})
        if placed is not None:
            held.append(after(asked, started(asked, nodes=placed)))
    sizes = [(job.num_workers, job.spec.resources.resources_per_worker.gpu) for job in held]
    assert sum(ranks * share for ranks, share in sizes) <= gpus + 1e-9
    assert free_on([there], held) == free_on([there], held[::-1])


def test_what_is_left_of_a_gpu_that_is_gone_is_not_free() -> None:
    assert put(job_of(1, gpu=0.5), node("a", gpus=1), others=(sharing(0.5, "0", "1"),)) is None


def test_a_share_on_a_gpu_that_a_lost_gang_still_counts_for_is_not_free_elsewhere() -> None:
    lost, placed = sharing(0.5, "0", "0", job_id="lost-abc234"), sharing(0.5, "0", job_id="placed-abc234")
    for others in ((lost, placed), (placed, lost)):
        assert free_on([node("a", gpus=2)], others)["a"].gpus == 0.5
        assert put(job_of(1), node("a", gpus=2), others=others) is None


def test_a_job_that_fits_only_with_nodes_that_are_down_waits_and_names_them() -> None:
    known = {"a": replace(A8, alive=False), "c": C4}
    waits = job_of(6)
    commands = decide(State(jobs={waits.id: waits}, nodes=known), T0 + 9)
    assert commands.waiting[waits.id] == AwaitsNodes(nodes=("a",), gpus=6, cpus=6)
    small, twin = replace(C4, id="d", name="small", alive=False, gpus=0), replace(known["a"], id="another id of a")
    assert missing_nodes(waits, {**known, "d": small, twin.id: twin}) == ("a",), (
        "each once, and none that holds no rank"
    )
    never = job_of(13)
    assert missing_nodes(never, known) == ()
    assert missing_nodes(job_of(6, gpu_model="H100"), known) == (), "a node that does not suit is not waited for"
