"""Saving, loading, listing and retention of one job's checkpoints."""

import json
import os

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CheckpointStatus, CorruptCheckpointError, StaleAttemptError
from orchestrator.checkpoint.errors import InsufficientSpaceError, ResumeMismatchError
from orchestrator.checkpoint.snapshots.file import SnapshotReader
from orchestrator.checkpoint.storage.storage import LocalStorage
from tests.support.disks import fill, small_disk

STATE = {"model": {"weight": torch.arange(6.0).reshape(2, 3)}, "epoch": 2}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "job" / "checkpoints"


def names(root):
    return sorted(name for name in os.listdir(root) if not name.startswith(".") and name != "fence.json")


def test_what_was_saved_is_loaded(root):
    store = CheckpointRepository(root, attempt=2, job_id="digits-k3f9q2")
    info = store.save(STATE, step=40, metrics={"loss": 0.5, "odd": float("nan")})
    loaded = CheckpointRepository(root, attempt=3).load_latest()
    assert torch.equal(loaded.state["model"]["weight"], STATE["model"]["weight"])
    assert (loaded.state["epoch"], loaded.step, loaded.attempt, loaded.rank_state) == (2, 40, 2, None)
    assert (loaded.path, loaded.bytes, loaded.world_size) == (info.path, info.bytes, 1)
    assert loaded.metrics["loss"] == 0.5
    assert loaded.metrics["odd"] != loaded.metrics["odd"]


def test_nothing_is_loaded_from_nothing(root):
    store = CheckpointRepository(root, attempt=1)
    assert store.load_latest() is None
    assert store.latest_good() is None
    assert store.list() == ()


def test_the_directory_holds_what_the_documentation_says(root):
    CheckpointRepository(root, attempt=1, job_id="digits-k3f9q2").save(STATE, step=40)
    assert names(root) == ["step-000000000040-a1"]
    folder = root / "step-000000000040-a1"
    assert names(folder) == ["manifest.json", "state.json", "state.safetensors"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["step"], manifest["attempt"]) == (
        "orch-checkpoint",
        1,
        40,
        1,
    )
    assert sorted(manifest["files"]) == ["state.json", "state.safetensors"]
    assert json.loads((folder / "state.json").read_text()) == {
        "model": {"weight": {"$": "tensor", "n": "model.weight"}},
        "epoch": 2,
    }


def test_the_newest_step_wins_and_a_newer_attempt_before_that(root):
    CheckpointRepository(root, attempt=1, keep=None).save({"from": 1}, step=200)
    second = CheckpointRepository(root, attempt=2, keep=None)
    second.save({"from": 2}, step=90)
    second.save({"from": 2}, step=100)
    loaded = CheckpointRepository(root, attempt=3).load_latest()
    assert (loaded.attempt, loaded.step) == (2, 100)
    assert [(info.attempt, info.step) for info in second.list()] == [(2, 100), (2, 90), (1, 200)]


def test_a_step_saved_twice_by_one_attempt_stays_as_it_was(root):
    store = CheckpointRepository(root, attempt=1)
    first = store.save({"n": 1}, step=5)
    assert store.save({"n": 2}, step=5) == first
    assert store.load_latest().state == {"n": 1}


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(root):
    store = CheckpointRepository(root, attempt=1)
    store.save({"n": 1}, step=5)
    (root / "step-000000000005-a1" / "manifest.json").write_text("{")
    store.save({"n": 2}, step=5)
    assert store.load_latest().state == {"n": 2}
    assert names(root) == ["step-000000000005-a1", "step-000000000005-a1.broken"]


def test_a_bad_checkpoint_is_set_aside_with_the_reason_and_the_one_before_is_used(root):
    store = CheckpointRepository(root, attempt=1)
    store.save({"n": 1}, step=1)
    store.save({"n": 2}, step=2)
    (root / "step-000000000002-a1" / "state.json").write_text("[]")
    loading = CheckpointRepository(root, attempt=2)
    assert loading.load_latest().state == {"n": 1}
    assert loading.quarantined == ("step-000000000002-a1: state.json has 2 bytes instead of 7",)
    broken = next(info for info in loading.list() if info.status is CheckpointStatus.BROKEN)
    assert (broken.name, broken.step, broken.why) == (
        "step-000000000002-a1.broken",
        2,
        "state.json has 2 bytes instead of 7",
    )


def test_when_all_are_bad_nothing_is_loaded_and_all_are_told(root):
    store = CheckpointRepository(root, attempt=1)
    for step in (1, 2, 3):
        store.save({"n": step}, step=step)
        (root / f"step-00000000000{step}-a1" / "state.json").unlink()
    loading = CheckpointRepository(root, attempt=2)
    assert loading.load_latest() is None
    assert [line.split(":")[0] for line in loading.quarantined] == [f"step-00000000000{step}-a1" for step in (3, 2, 1)]


def test_verify_tells_without_changing_anything(root):
    store = CheckpointRepository(root, attempt=1)
    good, bad = store.save({"n": 1}, step=1), store.save(STATE, step=2)
    path = root / bad.name / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert store.verify(good) == good
    found = store.verify(bad)
    assert (found.status, found.why) == (
        CheckpointStatus.BROKEN,
        "state.safetensors was changed: its SHA-256 differs from the manifest",
    )
    assert store.verify(found) == found
    assert names(root) == [good.name, bad.name]
    assert store.latest_good() == good
    assert names(root) == [good.name, f"{bad.name}.broken"]


def test_a_checkpoint_under_another_name_is_refused(root):
    store = CheckpointRepository(root, attempt=1)
    info = store.save({"n": 1}, step=1)
    os.rename(info.path, root / "step-000000000009-a1")
    assert store.load_latest() is None
    assert "manifest is that of step 1, attempt 1" in store.quarantined[0]


# Retention


def test_the_newest_are_kept(root):
    store = CheckpointRepository(root, attempt=1, keep=2)
    for step in range(5):
        store.save({"n": step}, step=step)
    assert names(root) == ["step-000000000003-a1", "step-000000000004-a1"]


@pytest.mark.parametrize(("order", "best"), [("min", 1), ("max", 3)])
def test_the_best_by_score_is_kept_as_well(root, order, best):
    store = CheckpointRepository(root, attempt=1, keep=1, score_attribute="loss", score_order=order)
    for step, loss in enumerate([0.5, 0.1, 0.4, 0.9, 0.3]):
        store.save({"n": step}, step=step, metrics={"loss": loss})
    store.save({"n": 5}, step=5, metrics={"loss": float("nan")})
    store.save({"n": 6}, step=6)
    assert names(root) == [f"step-00000000000{best}-a1", "step-000000000006-a1"]


def test_the_last_one_that_verifies_is_not_removed_for_one_that_does_not(root, monkeypatch):
    store = CheckpointRepository(root, attempt=1, keep=None)
    for step in (1, 2):
        store.save({"n": step}, step=step)
    path = root / "step-000000000002-a1" / "state.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    assert CheckpointRepository(root, attempt=1, keep=1).retain() == ()
    assert CheckpointRepository(root, attempt=2).load_latest().state == {"n": 1}


def test_broken_ones_do_not_fill_the_disk(root):
    store = CheckpointRepository(root, attempt=1, keep=1)
    for step in range(6):
        info = store.save({"n": step}, step=step)
        os.unlink(os.path.join(info.path, "state.json"))
        store.load_latest()
    store.save({"n": 9}, step=9)
    assert names(root) == ["step-000000000004-a1.broken", "step-000000000005-a1.broken", "step-000000000009-a1"]


@pytest.mark.parametrize(
    ("options", "message"), [({"keep": 0}, "keep is 0"), ({"score_order": "up"}, "'max' or 'min'")]
)
def test_senseless_retention_is_refused(root, options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointRepository(root, attempt=1, **options)


# Attempts


def test_an_older_attempt_is_refused_from_the_moment_the_newer_one_loads(root):
    old = CheckpointRepository(root, attempt=1)
    old.save({"n": 1}, step=1)
    CheckpointRepository(root, attempt=2).load_latest()
    for store in (old, CheckpointRepository(root, attempt=1)):
        with pytest.raises(StaleAttemptError, match=r"attempt 2 has taken over .* belongs to attempt 1 and must end"):
            store.save({"n": 2}, step=2)
    with pytest.raises(StaleAttemptError):
        CheckpointRepository(root, attempt=1).load_latest()
    assert names(root) == ["step-000000000001-a1"]


def test_an_older_attempt_is_refused_even_when_the_newer_one_starts_during_its_save(root):
    class Interrupted(LocalStorage):
        def write(self, path, chunks, *, durable=True):
            if path.endswith("state.json"):
                CheckpointRepository(root, attempt=2).load_latest()
            return super().write(path, chunks, durable=durable)

    with pytest.raises(StaleAttemptError):
        CheckpointRepository(Interrupted(root), attempt=1).save({"n": 1}, step=1)
    assert names(root) == []


def test_an_older_attempt_whose_half_written_files_the_newer_one_clears_away_is_told_why(root):
    class Cleared(LocalStorage):
        def write(self, path, chunks, *, durable=True):
            written = super().write(path, chunks, durable=durable)
            CheckpointRepository(root, attempt=2).load_latest()
            self.sync(path.rpartition("/")[0])  # the last operation of a write; the directory no longer exists
            return written

    with pytest.raises(StaleAttemptError, match="attempt 2 has taken over"):
        CheckpointRepository(Cleared(root), attempt=1).save({"w": 1}, step=1)


def test_a_run_that_nobody_numbers_continues_the_newest_attempt(root):
    assert CheckpointRepository(root).attempt == 1
    CheckpointRepository(root, attempt=7).save({"n": 1}, step=1)
    store = CheckpointRepository(root)
    assert store.attempt == 7
    store.save({"n": 2}, step=2)
    assert store.load_latest().state == {"n": 2}


def test_what_dead_runs_left_half_done_is_cleared_away(root):
    root.mkdir(parents=True)
    for name in (
        ".staging-step-000000000009-a1-old",
        ".staging-step-000000000009-a2-othertoken",
        ".removing-step-000000000001-a1",
    ):
        (root / name).mkdir()
        (root / name / "state.json").write_text("{}")
    (root / ".resume-a1-old-0.json").write_text("{}")
    listed = CheckpointRepository(root, attempt=1).list()
    assert {(info.status, info.step) for info in listed} == {(CheckpointStatus.INCOMPLETE, 9)}
    assert "its writer died" in listed[0].why
    CheckpointRepository(root, attempt=2, token="mine").load_latest()
    assert sorted(os.listdir(root)) == [".lock", "fence.json"]


# Failures of storage


def test_too_little_space_is_noticed_before_anything_is_written(root, monkeypatch):
    store = CheckpointRepository(root, attempt=1)
    store.save(STATE, step=1)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda _self: 1000)
    with pytest.raises(InsufficientSpaceError, match=r"1000 B free, the checkpoint needs .* lower checkpoint.keep"):
        store.save(STATE, step=2)
    assert names(root) == ["step-000000000001-a1"]


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_attempts_resume_on_a_full_disk_and_their_ranks_from_the_same_one(tmp_path, kind):
    snapshots = SnapshotReader(tmp_path / "snapshots", job_id="j")
    with small_disk(tmp_path, 8, kind=kind) as disk:
        store = CheckpointRepository(disk / "root", attempt=1, keep=None)
        for step in (1, 2):
            store.save(STATE, step=step)
        ballast = fill(disk)

        def rank_of_two(number, **where):
            return CheckpointRepository(disk / "root", attempt=2, rank=number, world_size=2, token="t", **where)

        assert rank_of_two(0, snapshots=snapshots).load_latest().step == 2
        os.unlink(disk / "root" / "step-000000000002-a1" / "manifest.json")
        fill(disk)
        with pytest.raises(ResumeMismatchError):
            rank_of_two(1, snapshots=snapshots).load_latest()
        with pytest.raises(OSError, match="No space left"):
            rank_of_two(0).load_latest()  # and not a choice of its own
        assert CheckpointRepository(disk / "root", attempt=3).load_latest().step == 1
        with pytest.raises(InsufficientSpaceError):
            CheckpointRepository(disk / "root", attempt=3).save({"w": bytes(50_000)}, step=2)
        assert not [name for name in os.listdir(disk / "root") if name.startswith(".draft")]
        ballast.unlink()
        CheckpointRepository(disk / "root", attempt=4).save(STATE, step=2)
        assert CheckpointRepository(disk / "root", attempt=5).load_latest().step == 2


def test_a_named_checkpoint_is_loaded_or_refused(root, tmp_path):
    info = CheckpointRepository(root, attempt=1).save({"n": 1}, step=1)
    store = CheckpointRepository(tmp_path / "other", attempt=1)
    assert store.load_path(info.path + "/").state == {"n": 1}
    os.unlink(os.path.join(info.path, "state.json"))
    with pytest.raises(CorruptCheckpointError, match=r"cannot resume from .*state.json is missing; name another"):
        store.load_path(info.path)
    with pytest.raises(CorruptCheckpointError, match="cannot resume from"):
        store.load_path(str(tmp_path / "nothing"))


def test_a_lock_that_is_never_released_does_not_block_for_ever(root):
    holder = LocalStorage(root)
    with holder.lock() as first:
        assert first
        other = CheckpointRepository(LocalStorage(root, lock_timeout_seconds=0.05), attempt=1)
        assert other.save({"n": 1}, step=1).step == 1
