"""Saving through shared memory: its use by the training script, and the reports on the page."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, UnsupportedStateError
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
from orchestrator.checkpoint.storage.directory import CheckpointStatus
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.saving import CheckpointWarning
from orchestrator.train.script.training_context import Context


@pytest.fixture
def make(tmp_path, page):
    def make(**environ):
        defaults = {
            "ORCH_JOB_ID": "j",
            "ORCH_ATTEMPT": "1",
            "ORCH_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "ORCH_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        }
        return Context(read_environment({**defaults, **environ}), page)

    return make


def test_a_save_goes_to_memory_and_the_next_attempt_resumes_from_there(make, page, tmp_path):
    ctx = make()
    assert ctx.load() is None
    for step in range(1, 4):
        assert ctx.save({"w": torch.full((3,), float(step))}, step=step, metrics={"loss": 0.5})
    seen = page.read()
    assert (seen.snapshot_step, seen.saves, seen.checkpoint.saved_step, seen.saving_since) == (3, 3, None, None)
    assert seen.snapshot_at > 0
    assert seen.save_seconds > 0
    loaded = make(ORCH_ATTEMPT="2").load()
    assert (loaded.step, loaded.path, loaded.metrics) == (3, "memory", {"loss": 0.5})
    assert (page.read().checkpoint.resumed_step, page.read().checkpoint.resumed_path) == (3, "memory")
    assert CheckpointRepository(tmp_path / "checkpoints").list() == ()


def test_the_page_tells_what_memory_snapshots_take_and_why_there_are_none(make, page, monkeypatch):
    from orchestrator.checkpoint.snapshots import file as snapshot_file

    ctx = make()
    assert ctx.save({"w": torch.zeros(10_000)}, step=1)
    told = page.read().checkpoint
    assert 120_000 < told.snapshot_bytes < 400_000, "three slots"
    assert told.snapshots_off == ""
    monkeypatch.setattr(snapshot_file, "available_memory_bytes", lambda: 1000)
    with pytest.warns(CheckpointWarning, match="no room for a snapshot"):
        assert ctx.save({"w": torch.zeros(90_000)}, step=2)
    assert "go to storage directly" in page.read().checkpoint.snapshots_off
    monkeypatch.setattr(snapshot_file, "available_memory_bytes", lambda: None)
    assert ctx.save({"w": torch.zeros(90_000)}, step=3)
    told = page.read().checkpoint
    assert told.snapshot_bytes > 3 * 360_000
    assert told.snapshots_off == ""


def test_the_rank_actor_brings_it_to_storage(make, tmp_path):
    make().save({"w": 1}, step=3)
    persister = SnapshotPersister(
        tmp_path / "snapshots", rank=0, settings=StoreSettings(root=str(tmp_path / "checkpoints"))
    )
    assert persister.flush(300)
    persister.close()
    elsewhere = make(ORCH_ATTEMPT="2", ORCH_SNAPSHOT_DIR="").load()
    assert (elsewhere.state, elsewhere.step) == ({"w": 1}, 3)


def test_without_shared_memory_it_goes_to_storage_and_says_so_once(make, page, tmp_path):
    (tmp_path / "file").write_text("")
    ctx = make(ORCH_SNAPSHOT_DIR=str(tmp_path / "file" / "x"))
    with pytest.warns(CheckpointWarning, match="checkpoints go to storage directly"):
        assert ctx.save({"n": 1}, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ctx.save({"n": 2}, step=2)
    assert (page.read().checkpoint.saved_step, page.read().snapshot_step) == (2, None)


def test_parts_of_ranks_on_several_nodes_meet_on_storage(make, page, tmp_path):
    for rank in (0, 1):
        ctx = make(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        assert ctx.save({"n": 1}, step=1, rank_state={"rank": rank})
    assert page.read().snapshot_step is None
    assert CheckpointRepository(tmp_path / "checkpoints").latest_good().step == 1


def test_shared_state_of_several_nodes_goes_to_rank_0s_memory_but_is_resumed_from_storage(make, page):
    nodes = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    make(RANK="0", **nodes).save({"n": 1}, step=1)
    assert page.read().snapshot_step == 1
    assert make(RANK="0", ORCH_ATTEMPT="2", **nodes).load() is None


def test_a_state_that_cannot_be_stored_is_an_error_here_too(make):
    ctx = make()
    with pytest.raises(UnsupportedStateError, match="model: pass the state"):
        ctx.save({"model": torch.nn.Linear(1, 1)}, step=1)
    assert ctx.save({"n": 1}, step=2)


def test_a_run_that_nobody_numbers_may_use_memory_too(make, tmp_path):
    CheckpointRepository(tmp_path / "checkpoints", attempt=4).save({"n": 0}, step=1)
    make(ORCH_ATTEMPT="").save({"n": 1}, step=2)
    assert make(ORCH_ATTEMPT="").load().attempt == 4


def test_should_save_follows_the_setting_and_the_page_says_why(make, page):
    every_other = make(ORCH_CHECKPOINT_INTERVAL="2")
    assert [step for step in range(1, 8) if every_other.should_save(step)] == [1, 3, 5, 7]
    automatic = make()
    for step in range(1, 10):
        if automatic.should_save(step):
            automatic.save({"n": step}, step=step)
    facts = page.read().checkpoint
    assert facts.interval_steps >= 1
    often = "every step" if facts.interval_steps == 1 else f"every {facts.interval_steps} steps"
    assert facts.interval_reason.startswith(often)


@pytest.mark.parametrize("step", ["1", 1.5, -1])
def test_should_save_refuses_a_bad_step(make, step):
    with pytest.raises((TypeError, ValueError), match="step"):
        make().should_save(step)


def test_ranks_that_cannot_agree_decide_for_themselves(make, tmp_path):
    (tmp_path / "file").write_text("")
    ctx = make(
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        ORCH_SNAPSHOT_DIR=str(tmp_path / "file" / "x"),
        ORCH_CHECKPOINT_INTERVAL="1",
    )
    with pytest.warns(CheckpointWarning, match="each rank decides for itself"):
        assert ctx.should_save(1)
    assert not ctx.should_stop()


def test_a_stop_that_orch_did_not_send_is_saved_to_storage_before_the_rank_leaves(make, page, tmp_path):
    ctx = make()
    assert ctx.save({"w": torch.ones(3)}, step=1)
    assert CheckpointRepository(tmp_path / "checkpoints").list() == ()
    ctx.confirm_stop()
    assert ctx.save({"w": torch.ones(3)}, step=2)
    assert [info.step for info in CheckpointRepository(tmp_path / "checkpoints").list()] == [2]
    seen = page.read()
    assert (seen.snapshot_step, seen.checkpoint.saved_step, seen.stop_seen) == (2, 2, True)


def test_a_stop_that_orch_sent_is_saved_by_the_rank_actor(make, page, tmp_path):
    ctx = make()
    page.request_stop()
    assert ctx.should_stop()
    assert ctx.save({"w": torch.ones(3)}, step=2)
    assert page.read().snapshot_step == 2
    assert CheckpointRepository(tmp_path / "checkpoints").list() == ()


def test_rank_and_rank_actor_never_store_at_the_same_time(make, tmp_path):
    ctx = make()
    assert ctx.save({"w": torch.ones(3)}, step=1)
    snapshots = tmp_path / "snapshots"
    persister = SnapshotPersister(snapshots, rank=0, settings=StoreSettings(root=str(tmp_path / "checkpoints")))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(snapshots)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "True\n"
        assert not persister.poll()
        ctx.confirm_stop()
        saving = threading.Thread(target=ctx.save, args=({"w": torch.ones(3)},), kwargs={"step": 2})
        saving.start()
        assert CheckpointRepository(tmp_path / "checkpoints").list() == (), "another process stores"
    finally:
        holder.communicate("\n")
    saving.join()
    assert [info.step for info in CheckpointRepository(tmp_path / "checkpoints").list()] == [2]
    assert persister.flush(300), "the lock is free again"
    infos = {info.step: info.status for info in CheckpointRepository(tmp_path / "checkpoints").list()}
    assert infos[2] is CheckpointStatus.COMPLETE
    assert set(infos.values()) == {CheckpointStatus.COMPLETE}
    persister.close()


def test_what_changes_after_a_save_is_not_in_the_snapshot(make, page):
    """Such as a few numbers written through `.data`, which torch does not count, before the next step of an optimizer."""
    ctx = make()
    model = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, 8):
        optimizer.zero_grad()
        model(torch.ones(1, 2048)).square().mean().backward()
        optimizer.step()
        weight, mean = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
        assert ctx.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=step)
        assert page.read().snapshot_step == step
        if step >= 5:  # a script that does so only from some step on
            model.weight.data[-1, -5:] += 1
            optimizer.state[model.weight]["exp_avg"].data[-1, -5:] += 1
        loaded = make(ORCH_ATTEMPT="2").load()
        assert loaded.step == step
        assert torch.equal(loaded.state["model"]["weight"], weight)
        assert torch.equal(loaded.state["optimizer"]["state"][0]["exp_avg"], mean)


HOLD = """
import sys
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory
with SnapshotDirectory(sys.argv[1]).storing(0) as alone:
    print(alone, flush=True)
    sys.stdin.readline()
"""
