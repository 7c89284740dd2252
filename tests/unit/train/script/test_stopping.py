"""All ranks of a node stop after the same step, whichever rank reads the request first."""

import subprocess
import threading
import time

import pytest

from orchestrator.train.script.agreement import ShmAgreement, StopAgreement
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.training_context import Context
from tests.support import warm
from tests.support.pages import BothSides
from tests.support.stack import PATIENCE_SECONDS
from tests.support.work import descriptors_stay


@pytest.fixture
def boards(tmp_path):
    made = [ShmAgreement(tmp_path, "run") for _ in range(3)]
    yield made
    for board in made:
        board.close()


def test_alone_it_is_now():
    alone = StopAgreement(None)
    assert [alone.is_now(requested=False), alone.is_now(requested=True)] == [False, True]


@pytest.mark.parametrize("hears", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_all_stop_after_the_step_that_follows_the_first_to_hear(boards, hears, order):
    ranks = [StopAgreement(board) for board in boards]
    stopped = {}
    for step in range(1, 10):
        for rank in order:
            if rank not in stopped and ranks[rank].is_now(requested=rank == hears and step >= 5):
                stopped[rank] = step
    assert stopped == {0: 6, 1: 6, 2: 6}


def test_all_hear_at_once_and_agree(boards):
    ranks = [StopAgreement(board) for board in boards]
    assert [[rank.is_now(requested=step >= 3) for rank in ranks] for step in (1, 2, 3, 4)] == [
        [False] * 3, [False] * 3, [False] * 3, [True] * 3,
    ]  # fmt: skip


def test_proposals_at_the_same_moment_have_one_winner(boards):
    barrier = threading.Barrier(3)
    results = []

    def propose(board, call):
        barrier.wait()
        results.append(board.propose_stop(call))

    threads = [threading.Thread(target=propose, args=(board, 5 + n)) for n, board in enumerate(boards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert {board.stop_call for board in boards} == {results[0]}


def test_a_rank_that_is_ahead_stops_at_once_and_one_far_behind_loses_its_patience(boards, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ahead, behind, teller = (StopAgreement(board) for board in boards)
    for _ in range(100):
        ahead.is_now(requested=False)
    for _ in range(50):
        teller.is_now(requested=False)
    teller.is_now(requested=True)
    assert ahead.is_now(requested=False)
    assert not behind.is_now(requested=False)
    now[0] = 5.5
    assert behind.is_now(requested=False)


def test_long_steps_are_waited_for(boards, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slow, teller = StopAgreement(boards[0]), StopAgreement(boards[1])
    for _ in range(3):
        slow.is_now(requested=False)
        now[0] += 60.0
    for _ in range(9):
        teller.is_now(requested=False)
    teller.is_now(requested=True)
    assert not slow.is_now(requested=False)
    now[0] += 299.0
    assert not slow.is_now(requested=False)
    now[0] += 2.0
    assert slow.is_now(requested=False)


RANK = """
import sys, time
from multiprocessing.connection import Client
from orchestrator.train import context
ctx = context()
peer = Client(sys.argv[1])
step = 0
while True:
    step += 1
    peer.send(step)
    peer.recv()  # the collective: every rank is here before any goes on
    ctx.report(step=step)
    if ctx.should_save(step):
        ctx.save({"step": step}, step=step, rank_state={"rank": ctx.rank, "step": step})
    if ctx.should_stop():
        break
ctx.save({"step": step}, step=step, rank_state={"rank": ctx.rank, "step": step})
print(step)
"""


def test_real_ranks_asked_at_different_moments_end_after_the_same_step_with_one_checkpoint(tmp_path):
    """Only rank 1's page has the request; both save their last state, and the next attempt finds it whole in memory."""
    from multiprocessing.connection import Listener

    pages = [BothSides.create(tmp_path / f"page{rank}") for rank in (0, 1)]
    environ = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "ORCH_JOB_ID": "j",
        "ORCH_ATTEMPT": "1",
        "ORCH_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "ORCH_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "ORCH_CHECKPOINT_INTERVAL": "3",
    }
    with Listener(str(tmp_path / "hub"), backlog=2) as hub:
        ranks = [
            warm.Warm(
                RANK,
                str(tmp_path / "hub"),
                env={
                    **environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "ORCH_PROGRESS_PATH": str(tmp_path / f"page{rank}"),
                },
                stdout=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]
        try:
            peers = [hub.accept(), hub.accept()]
            for step in range(1, 1000):
                try:
                    for peer in peers:
                        assert peer.recv() == step
                except EOFError:
                    break
                if step == 20:
                    pages[1].request_stop()
                for peer in peers:
                    peer.send(None)
            last = [int(rank.communicate(timeout=PATIENCE_SECONDS)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    for peer in peers:
        peer.close()
    assert last[0] == last[1] == step - 1
    assert 20 <= last[0] <= 22
    for rank in (0, 1):
        assert (pages[rank].read().snapshot_step, pages[rank].read().stop_seen) == (last[0], True)
        ctx = Context(read_environment({**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "ORCH_ATTEMPT": "2"}))
        loaded = ctx.load()
        assert (loaded.step, loaded.path, loaded.rank_state) == (last[0], "memory", {"rank": rank, "step": last[0]})
    for page in pages:
        page.close()


def test_a_board_that_cannot_be_made_whole_is_an_error_and_leaves_no_handle(tmp_path, monkeypatch):
    import errno
    import os

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with descriptors_stay(), pytest.raises(OSError, match="no space left"):
        ShmAgreement(tmp_path, "run")
