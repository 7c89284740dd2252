"""A hung job needs proof, a slow job takes time: tables of ranks' states, and healthy traces that raise no alarm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.diagnosis.health import (
    Call,
    Circumstances,
    Frame,
    RankLook,
    Standing,
    Thread,
    Wait,
    collective_of,
    judge,
    standing,
)
from tests.support.records import replace

TORCH = "/venv/site-packages/torch"
MINE = Frame("step", "/work/train.py", 12)
ALL_REDUCE = (
    Frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 3252),
    Frame("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
    MINE,
)
BROADCAST = (Frame("broadcast", f"{TORCH}/distributed/distributed_c10d.py", 3000), MINE)
BACKWARD = (Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 865), MINE)
LOCK = (Frame("pull", "/work/data.py", 7), MINE)


def look(
    rank: int = 0,
    frames: tuple[Frame, ...] = LOCK,
    *,
    state: str = "S",
    wait: Wait = Wait.LOCK,
    cpu: float = 10.0,
    others: tuple[Thread, ...] = (),
) -> RankLook:
    threads = (Thread(name="MainThread", frames=frames), *others) if frames else ()
    return RankLook(rank=rank, at=100.0, pid=50 + rank, state=state, wait=wait, cpu_seconds=cpu, threads=threads)


def pair(first: RankLook, *, cpu: float = 0.0, io: int = 0, **changes: object) -> tuple[RankLook, RankLook]:
    """Return the look, and one a second later with ``changes`` and the resources used in between."""
    after = replace(first, at=first.at + 1.0, cpu_seconds=first.cpu_seconds + cpu, io_bytes=first.io_bytes + io)
    return first, replace(after, **changes)  # type: ignore[arg-type]


def how(still: float = 4.0, *, usual: float | None = 0.1, certain: bool = True) -> Circumstances:
    return Circumstances(still_seconds=still, usual_seconds=usual, certain=certain)


LOADER = Thread(name="upload", frames=(Frame("read", "/usr/lib/python3.11/ssl.py", 1168),))
FEEDER = Thread(name="queue", frames=(Frame("wait", "/usr/lib/python3.11/threading.py", 327),))


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        (pair(look(state="T")), Standing.STOPPED),
        (pair(look(state="T"), state="S"), Standing.WORKS),
        (pair(look(state="t")), Standing.TRACED),
        (pair(look(), state="Z"), Standing.UNKNOWN),
        (pair(look(), pid=99), Standing.UNKNOWN),
        (pair(look(), at=100.1), Standing.UNKNOWN),
        (pair(look()), Standing.LOCKED),
        (pair(look(others=(FEEDER,))), Standing.LOCKED),
        (pair(look(others=(LOADER,))), Standing.OUTSIDE),
        (pair(look(frames=(Frame("result", "/usr/lib/python3.11/concurrent/futures/_base.py", 451), MINE))), Standing.OUTSIDE),
        (pair(look(), cpu=0.5), Standing.SPINS),
        (pair(look(), io=1 << 20), Standing.SPINS),
        (pair(look(), threads=(Thread(name="MainThread", frames=(MINE,)),)), Standing.WORKS),
        (pair(look(wait=Wait.OUTSIDE)), Standing.OUTSIDE),
        (pair(look(state="D")), Standing.OUTSIDE),
        (pair(look(wait=Wait.UNKNOWN)), Standing.UNKNOWN),
        (pair(look(frames=ALL_REDUCE)), Standing.COLLECTIVE),
        (pair(look(frames=ALL_REDUCE), cpu=1.0), Standing.COLLECTIVE),
        (pair(look(frames=())), Standing.UNKNOWN),
        (pair(look(frames=()), cpu=1.0), Standing.WORKS),
    ],
)  # fmt: skip
def test_what_two_looks_say(looks: tuple[RankLook, RankLook], found: Standing) -> None:
    assert standing(*looks) is found


def test_a_collective_is_told_by_the_frames_of_torch_at_the_top() -> None:
    assert collective_of(ALL_REDUCE) == "all_reduce"
    assert collective_of(BACKWARD) == "the exchange of gradients"
    assert collective_of(LOCK) == ""
    assert collective_of((MINE, *ALL_REDUCE)) == ""  # a function of the script, called by a collective
    assert collective_of(()) == ""


def test_a_stopped_rank_is_hung_whatever_the_others_do() -> None:
    verdict = judge({0: pair(look(0), cpu=1.0), 1: pair(look(1, state="T"))}, range(2), how())
    assert (verdict.call, verdict.rank) == (Call.HUNG, 1)
    assert "SIGSTOP" in verdict.seen.sentence()


def test_a_lock_under_others_that_wait_in_a_collective_is_a_deadlock_and_is_named() -> None:
    for others in (ALL_REDUCE, BACKWARD):
        pairs = {0: pair(look(0, others)), 1: pair(look(1, LOCK)), 2: pair(look(2, others))}
        verdict = judge(pairs, range(3), how())
        assert (verdict.call, verdict.rank) == (Call.HUNG, 1)
        assert "pull (/work/data.py:7)" in verdict.seen.sentence()
        assert collective_of(others) in verdict.seen.sentence()


def test_on_gpus_and_across_machines_only_a_lock_of_python_s_own_is_proof_at_once() -> None:
    own = (Frame("wait", "/usr/lib/python3.11/threading.py", 327), *LOCK)
    for frames, still, call in ((own, 4.0, Call.HUNG), (LOCK, 4.0, Call.SLOW), (LOCK, 61.0, Call.HUNG)):
        pairs = {0: pair(look(0, ALL_REDUCE)), 1: pair(look(1, frames))}
        assert judge(pairs, range(2), how(still, certain=False)).call is call


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    pairs = {0: pair(look(0, ALL_REDUCE)), 1: pair(look(1, BROADCAST)), 2: pair(look(2, ALL_REDUCE))}
    verdict = judge(pairs, range(3), how())
    assert (verdict.call, verdict.rank) == (Call.HUNG, 1)
    assert "broadcast while others wait in all_reduce" in verdict.seen.sentence()


def test_where_a_collective_may_be_at_work_unseen_only_time_makes_it_hung() -> None:
    same = {0: pair(look(0, ALL_REDUCE)), 1: pair(look(1, ALL_REDUCE))}
    assert judge(same, range(2), how(certain=True)).call is Call.HUNG
    assert judge(same, range(2), how(certain=False)).call is Call.SLOW
    assert judge(same, range(2), how(59.0, certain=False)).call is Call.SLOW
    assert judge(same, range(2), how(61.0, certain=False)).call is Call.HUNG
    assert judge(same, range(2), how(61.0, usual=7.0, certain=False)).call is Call.SLOW


def test_the_same_lock_on_every_rank_may_be_a_collective_that_leaves_no_frame() -> None:
    waiting = {rank: pair(look(rank, (Frame("reduce", "/work/train.py", 3),))) for rank in range(2)}
    assert judge(waiting, range(2), how(certain=False)).call is Call.SLOW
    assert judge(waiting, range(2), how(61.0, certain=False)).call is Call.HUNG


def test_a_rank_that_spins_beside_a_lock_makes_it_a_matter_of_time() -> None:
    pairs = {0: pair(look(0), cpu=1.0), 1: pair(look(1, (Frame("other", "/work/x.py", 1),)))}
    assert judge(pairs, range(2), how()).call is Call.SLOW
    assert judge(pairs, range(2), how(61.0)).call is Call.HUNG


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (pair(look(0), threads=(Thread(name="m", frames=(MINE,)),)), "computes"),
        (pair(look(0, (MINE,)), cpu=1.0), "busy"),
        (pair(look(0, wait=Wait.OUTSIDE)), "the network or a sleep"),
        (pair(look(0, state="D")), "a disk"),
        (pair(look(0, state="t")), "debugger"),
        (pair(look(0, ())), "nothing shows what it waits for"),
        (pair(replace(look(0, ()), problem="py-spy is not installed")), "py-spy is not installed"),
    ],
)
def test_whoever_may_go_on_makes_the_job_slow_however_long_it_lasts(
    worker: tuple[RankLook, RankLook], words: str
) -> None:
    verdict = judge({0: worker, 1: pair(look(1, ALL_REDUCE))}, range(2), how(1e6))
    assert (verdict.call, verdict.rank) == (Call.SLOW, 0)
    assert words in verdict.seen.sentence()


def test_a_rank_that_could_not_be_looked_at_may_be_at_work() -> None:
    verdict = judge({1: pair(look(1))}, range(2), how(1e6))
    assert (verdict.call, verdict.rank) == (Call.SLOW, 0)
    assert judge({}, (), how()).call is Call.SLOW


EVALUATES = (Frame("evaluate", "/work/train.py", 90), MINE)
HEALTHY = st.sampled_from(
    [
        pair(look(0, EVALUATES), cpu=0.9),
        pair(look(0, EVALUATES, wait=Wait.OUTSIDE)),
        pair(look(0, EVALUATES, state="D")),
        pair(look(0, EVALUATES), io=10**8),
        pair(look(0, EVALUATES, others=(LOADER,))),
        pair(look(0, EVALUATES), threads=(Thread(name="MainThread", frames=(MINE,)),)),
    ]
)
WAITING = st.sampled_from(
    [pair(look(0, ALL_REDUCE)), pair(look(0, BACKWARD)), pair(look(0, ALL_REDUCE), cpu=1.0), pair(look(0, LOCK))]
)


@given(
    st.lists(WAITING, max_size=6), HEALTHY, st.integers(0, 6), st.floats(0, 1e6), st.floats(1e-3, 1e3), st.booleans()
)
def test_as_long_as_one_rank_may_be_at_work_nothing_is_hung(
    others: list[tuple[RankLook, RankLook]],
    worker: tuple[RankLook, RankLook],
    at: int,
    still: float,
    usual: float,
    certain: bool,
) -> None:
    ranks = [*others[:at], worker, *others[at:]]
    # A rank that spins at one place among ranks in a lock counts as hung only after a long time.
    spins = standing(*worker) is Standing.SPINS
    circumstances = how(min(still, 59.0) if spins else still, certain=certain)
    assert (
        judge(dict(enumerate(ranks)), range(len(ranks)), replace(circumstances, usual_seconds=usual)).call is Call.SLOW
    )
