"""Checkpoints with a part from every rank: one counts when all parts are stored, and all ranks load the same one."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from orchestrator.checkpoint import CheckpointRepository, CheckpointStatus, ResumeMismatchError
from tests.support.stack import PATIENCE_SECONDS


def stores(root, world_size, attempt=1, **options):
    return [
        CheckpointRepository(root, attempt=attempt, rank=rank, world_size=world_size, token=f"run{attempt}", **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_last_rank_commits_whichever_it_is(tmp_path, order):
    gang = stores(tmp_path, 3)
    infos = [gang[rank].save({"n": 1}, step=1, rank_state={"rank": rank}) for rank in order]
    assert infos[:2] == [None, None]
    assert infos[2].step == 1
    for rank, store in enumerate(stores(tmp_path, 3, attempt=2)):
        loaded = store.load_latest()
        assert (loaded.state, loaded.rank_state, loaded.world_size) == ({"n": 1}, {"rank": rank}, 3)


def test_until_every_part_is_in_it_does_not_count(tmp_path):
    gang = stores(tmp_path, 2)
    for store in gang:
        store.save({"n": 1}, step=1, rank_state=store.rank)
    gang[0].save({"n": 2}, step=2, rank_state=0)
    incomplete = gang[0].list()[0]
    assert (incomplete.status, incomplete.step) == (CheckpointStatus.INCOMPLETE, 2)
    assert "1 ranks had finished" in incomplete.why
    assert stores(tmp_path, 2, attempt=2)[1].load_latest().step == 1


def test_parts_of_different_attempts_or_runs_never_make_one_checkpoint(tmp_path):
    stores(tmp_path, 2)[0].save({"n": 1}, step=1, rank_state="old")
    assert stores(tmp_path, 2, attempt=2)[1].save({"n": 2}, step=1, rank_state="new") is None
    same_attempt = CheckpointRepository(tmp_path, attempt=2, rank=0, world_size=2, token="another")
    assert same_attempt.save({"n": 2}, step=1, rank_state="new") is None
    assert stores(tmp_path, 2, attempt=3)[0].load_latest() is None


def test_only_rank_0_stores_what_all_share(tmp_path):
    gang = stores(tmp_path, 2)
    assert gang[1].save({"ignored": 1}, step=1) is None
    assert os.listdir(tmp_path) == []
    assert gang[0].save({"kept": 1}, step=1).step == 1
    assert [store.load_latest().state for store in stores(tmp_path, 2, attempt=2)] == [{"kept": 1}, {"kept": 1}]


def test_another_number_of_ranks_gets_the_shared_state_and_may_read_every_part(tmp_path):
    for store in stores(tmp_path, 3):
        store.save({"n": 1}, step=1, rank_state={"rank": store.rank})
    for store in stores(tmp_path, 2, attempt=2):
        loaded = store.load_latest()
        assert (loaded.state, loaded.rank_state, loaded.world_size) == ({"n": 1}, None, 3)
        assert [loaded.rank_states(rank) for rank in range(4)] == [{"rank": 0}, {"rank": 1}, {"rank": 2}, None]


def test_leftovers_of_a_step_that_one_rank_skipped_go_with_the_next_commit(tmp_path):
    gang = stores(tmp_path, 2)
    gang[0].save({"n": 1}, step=1, rank_state=0)
    for store in gang:
        store.save({"n": 2}, step=2, rank_state=store.rank)
    assert [info.step for info in gang[0].list()] == [2]


def test_all_ranks_load_what_the_first_one_decided(tmp_path):
    for step in (1, 2):
        for store in stores(tmp_path, 2):
            store.save({"n": step}, step=step, rank_state=store.rank)
    first, second = stores(tmp_path, 2, attempt=2)
    assert first.load_latest().step == 2
    for store in stores(tmp_path, 2, attempt=2):  # a third checkpoint appears in between
        store.save({"n": 3}, step=3, rank_state=store.rank)
    assert second.load_latest().step == 2
    assert [first.load_latest().step, second.load_latest().step] == [3, 3]


def test_that_there_is_nothing_to_load_is_agreed_upon_too(tmp_path):
    first, second = stores(tmp_path, 2)
    assert first.load_latest() is None
    for store in stores(tmp_path, 2):
        store.save({"n": 1}, step=1, rank_state=store.rank)
    assert second.load_latest() is None


def test_a_rank_that_cannot_read_what_was_agreed_stops_and_the_next_attempt_falls_back(tmp_path):
    for step in (1, 2):
        for store in stores(tmp_path, 2):
            store.save({"n": step}, step=step, rank_state={"rank": store.rank})
    first, second = stores(tmp_path, 2, attempt=2)
    first.load_latest()
    (tmp_path / "step-000000000002-a1" / "rank-00001.json").write_text("{}")
    with pytest.raises(ResumeMismatchError, match="rank 1 cannot load step-000000000002-a1"):
        second.load_latest()
    assert {store.load_latest().step for store in stores(tmp_path, 2, attempt=3)} == {1}


GANG_MEMBER = """
import json, sys
from orchestrator.checkpoint import CheckpointRepository
root, attempt, rank, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = CheckpointRepository(root, attempt=attempt, rank=rank, world_size=3, token=f"run{attempt}", keep=2)
found = store.load_latest()
start = 0 if found is None else found.step
print(json.dumps([start, None if found is None else [found.state, found.rank_state]]), flush=True)
for step in range(start + 1, start + steps + 1):
    store.save({"step": step}, step=step, rank_state={"rank": rank, "step": step, "fill": "x" * 5000})
"""


def launch(root, attempt, steps):
    return [
        subprocess.Popen(
            [sys.executable, "-c", GANG_MEMBER, str(root), str(attempt), str(rank), str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


def test_real_ranks_without_any_communication_and_with_kills_never_mix_steps(tmp_path):
    """Three processes save in parallel; one is killed at a random moment; all then resume from the same step."""
    chance = random.Random(3)
    for attempt in range(1, 6):
        gang = launch(tmp_path, attempt, 12)
        try:
            starts = [json.loads(member.stdout.readline()) for member in gang]
            assert len({start for start, _ in starts}) == 1
            for rank, (start, found) in enumerate(starts):
                assert (found is None) == (start == 0)
                if found is not None:
                    assert found[0] == {"step": start}
                    assert (found[1]["rank"], found[1]["step"]) == (rank, start)
            spin = chance.randrange(0, 1_000_000)
            while spin:
                spin -= 1
            gang[chance.randrange(3)].send_signal(signal.SIGKILL)
            for member in gang:
                _, complaint = member.communicate(timeout=PATIENCE_SECONDS)
                assert member.returncode in (0, -signal.SIGKILL), complaint
        finally:
            for member in gang:
                member.kill()
                member.wait()
    reader = CheckpointRepository(tmp_path, attempt=99)
    assert {info.status for info in reader.list()} <= {CheckpointStatus.COMPLETE, CheckpointStatus.INCOMPLETE}
    assert reader.load_latest().step > 0
    assert reader.quarantined == ()
