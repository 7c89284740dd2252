"""Causes that keep ranks from their process group, found in their stacks."""

from __future__ import annotations

import pytest

from orchestrator.core.diagnosis.diagnosis import Diagnosis
from orchestrator.core.diagnosis.health import Frame, RankLook, Thread, gathering
from orchestrator.core.diagnosis.observation import JobSeen, StallSeen
from orchestrator.core.facts.findings import Lateness, Sign, Stillness

C10D = "/venv/site-packages/torch/distributed/distributed_c10d.py"
WAITING = (Frame("_new_process_group_helper", C10D, 2169), Frame("init_process_group", C10D, 1899))
LOADING = (Frame("load", "/work/train.py", 12),)
Pair = tuple[RankLook, RankLook]


def pair(rank: int, frames: tuple[Frame, ...] = WAITING, *, busy: float = 0.0, size: int | None = 3) -> Pair:
    def look(at: float) -> RankLook:
        threads = (Thread(name="MainThread", frames=frames),)
        return RankLook(rank=rank, at=at, pid=9, state="S", cpu_seconds=busy * at, threads=threads, world_size=size)

    return look(1.0), look(2.0)


@pytest.mark.parametrize(
    ("looks", "seen"),
    [
        ([pair(0), pair(1), pair(2, LOADING)], (Sign.RENDEZVOUS, 2, None)),
        ([pair(0), pair(1), pair(2, LOADING, busy=0.9)], None),  # it is still at work
        ([pair(0), pair(1)], (Sign.RENDEZVOUS, 2, None)),  # rank 2 cannot be inspected
        ([pair(0), pair(1), pair(2)], (Sign.RENDEZVOUS, None, None)),
        ([pair(rank, size=8) for rank in range(3)], (Sign.WORLD_SIZE, None, 8)),
        ([pair(0), pair(1, size=4), pair(2)], (Sign.WORLD_SIZE, 1, 4)),
        ([pair(0, size=None), pair(1, size=None), pair(2, size=None)], (Sign.RENDEZVOUS, None, None)),
        ([pair(rank, LOADING) for rank in range(3)], None),
        ([], None),
    ],
)
def test_who_keeps_the_others_from_their_process_group(
    looks: list[Pair], seen: tuple[Sign, int | None, int | None] | None
) -> None:
    found = gathering({before.rank: (before, after) for before, after in looks}, 3)
    assert (None if found is None else (found.sign, found.rank, found.world_size)) == seen


@pytest.mark.parametrize(
    ("seen", "kind", "after", "said"),
    [
        (
            Stillness(rank=None, sign=Sign.WORLD_SIZE, world_size=8, num_ranks=2),
            "wrong_world_size",
            10.0,
            "every rank waits in init_process_group for 8 ranks, and the job has 2 ranks",
        ),
        (
            Stillness(rank=1, sign=Sign.RENDEZVOUS, place="load (train.py:12)", num_ranks=2),
            "rendezvous_incomplete",
            30.0,
            "rank 1 does not enter init_process_group, in load (train.py:12), and the others wait for it there",
        ),
        (
            Stillness(rank=None, sign=Sign.RENDEZVOUS, num_ranks=2),
            "rendezvous_incomplete",
            30.0,
            "every rank waits in init_process_group, and the process group does not form",
        ),
    ],
)
def test_it_is_told_before_any_step_is_made(seen: Stillness, kind: str, after: float, said: str) -> None:
    diagnosis, opened = Diagnosis(0.0), []
    for tick in range(1, 30):
        stall = StallSeen(seen=seen, late=Lateness(still_seconds=2.0 * tick, by_steps=False))
        opened += [(2.0 * tick, one) for one in diagnosis.observe(JobSeen(stall=stall), 2.0 * tick, 0.0).opened]
    ((at, finding),) = opened
    assert (at, finding.kind, finding.rank) == (after, kind, seen.rank)
    assert finding.sentence() == f"no sign of life for {after:.0f}s; {said}"
    assert finding.advice("digits-abc234")


def test_a_rank_that_sleeps_is_said_to_sleep() -> None:
    seen = Stillness(rank=3, sign=Sign.OUTSIDE, place="pull (data.py:7)", waits="timer")
    assert seen.sentence() == "rank 3 sleeps, in pull (data.py:7)"
