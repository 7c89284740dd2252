"""Checkpoints behind a URL: the same guarantees without renames, locks and syncs."""

import errno
import secrets
import threading

import fsspec
import pytest
import torch

from orchestrator.checkpoint import (
    CheckpointError,
    CheckpointRepository,
    CheckpointStatus,
    ResumeMismatchError,
    StaleAttemptError,
)
from orchestrator.checkpoint.storage.object_storage import ObjectStorage
from orchestrator.checkpoint.storage.storage import LocalStorage, open_storage
from tests.unit.checkpoint.faulty import PowerCutError


@pytest.fixture
def url():
    url = f"memory://{secrets.token_hex(8)}/job/checkpoints"
    yield url
    fs = fsspec.filesystem("memory")
    top = url.removeprefix("memory:/").split("/job")[0]
    if fs.exists(top):
        fs.rm(top, recursive=True)


def state(step):
    return {"step": step, "weight": torch.full((50,), float(step))}


def check(loaded, step):
    assert loaded.step == loaded.state["step"] == step
    assert torch.equal(loaded.state["weight"], torch.full((50,), float(step)))


class Faulty(ObjectStorage):
    """Object storage that fails, or dies, at the n-th modifying request."""

    def __init__(self, url, fail_at=None, error=None):
        super().__init__(url)
        self.requests, self.fail_at, self.error, self.dead = 0, fail_at, error, False
        real = self._fs
        outer = self

        class Requests:
            def __getattr__(self, name):
                if name in ("pipe_file", "cp_file", "rm_file", "open"):
                    return lambda *args: outer.request(getattr(real, name), args)
                if outer.dead:
                    raise PowerCutError
                return getattr(real, name)

        self._fs = Requests()

    def request(self, call, args):
        if self.dead:
            raise PowerCutError
        self.requests += args[1:] != ("rb",)
        if self.requests == self.fail_at and args[1:] != ("rb",):
            self.dead = self.error is None
            raise PowerCutError if self.error is None else self.error
        return call(*args)


def test_what_was_saved_is_loaded(url):
    store = CheckpointRepository(url, attempt=1, job_id="j")
    info = store.save(state(4), step=4, metrics={"loss": 0.5})
    assert info.path == f"{url}/step-000000000004-a1"
    loaded = CheckpointRepository(url, attempt=2).load_latest()
    check(loaded, 4)
    assert (loaded.path, loaded.metrics) == (info.path, {"loss": 0.5})
    check(CheckpointRepository(url, attempt=2).load_path(info.path), 4)
    loaded.state["weight"] += 1


def test_damage_is_noticed_and_set_aside(url):
    store = CheckpointRepository(url, attempt=1)
    for step in (1, 2):
        store.save(state(step), step=step)
    store.storage.write("step-000000000002-a1/state.json", [b"{}"])
    loading = CheckpointRepository(url, attempt=2)
    check(loading.load_latest(), 1)
    assert [(info.status, info.step) for info in loading.list()] == [
        (CheckpointStatus.BROKEN, 2),
        (CheckpointStatus.COMPLETE, 1),
    ]
    assert "state.json has 2 bytes" in loading.list()[0].why


def test_retention_and_fence_work(url):
    old = CheckpointRepository(url, attempt=1, keep=2)
    for step in range(5):
        old.save(state(step), step=step)
    assert [info.step for info in old.list()] == [4, 3]
    CheckpointRepository(url, attempt=2).load_latest()
    with pytest.raises(StaleAttemptError):
        old.save(state(9), step=9)


def count(url):
    storage = Faulty(url)
    store = CheckpointRepository(storage, attempt=1, keep=2)
    for step in (1, 2):
        store.save(state(step), step=step)
    before = storage.requests
    store.save(state(3), step=3)
    return range(before + 1, storage.requests + 1)


def test_a_kill_at_any_request_leaves_a_good_one(url):
    assert len(count(f"{url}/count")) > 8
    for fail_at in count(f"{url}/again"):
        root = f"{url}/{fail_at}"
        store = CheckpointRepository(Faulty(root, fail_at), attempt=1, keep=2)
        for step in (1, 2):
            store.save(state(step), step=step)
        with pytest.raises(PowerCutError):
            store.save(state(3), step=3)
        after = CheckpointRepository(root, attempt=2, keep=2)
        loaded = after.load_latest()
        check(loaded, loaded.step)
        assert loaded.step in (2, 3)
        assert after.quarantined == ()
        after.save(state(4), step=4)
        check(CheckpointRepository(root, attempt=3).load_latest(), 4)
        left = {key.split("/")[0] for key in after.storage._keys("")}
        assert not [name for name in left if name.startswith((".staging", ".removing"))]
        assert left == set(after.storage.names())  # nothing half-committed either


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "slow down"), RuntimeError("connection reset"), PermissionError(errno.EACCES, "no")]
)
def test_a_store_that_fails_leaves_a_good_one_and_the_next_save_works(url, error):
    for fail_at in count(f"{url}/count"):
        root = f"{url}/{fail_at}"
        storage = Faulty(root, fail_at, error)
        store = CheckpointRepository(storage, attempt=1, keep=2)
        for step in (1, 2):
            store.save(state(step), step=step)
        raised = None
        try:
            store.save(state(3), step=3)
        except OSError as problem:
            raised = problem
        assert raised is None or raised.errno != errno.EIO
        loaded = CheckpointRepository(root, attempt=1).load_latest()
        check(loaded, loaded.step)
        assert loaded.step in (2, 3)
        store.save(state(4), step=4)
        check(CheckpointRepository(root, attempt=2).load_latest(), 4)


def test_a_store_out_of_reach_quarantines_nothing(url):
    CheckpointRepository(url, attempt=1).save(state(1), step=1)
    storage = ObjectStorage(url)
    storage.read = lambda path, *_: (
        (_ for _ in ()).throw(OSError(errno.EREMOTEIO, "away"))
        if path.endswith("state.json")
        else ObjectStorage.read(storage, path)
    )
    with pytest.raises(OSError, match="away"):
        CheckpointRepository(storage, attempt=2).load_latest()
    check(CheckpointRepository(url, attempt=3).load_latest(), 1)


# Ranks


def gang(url, step, attempt=1, storage=None):
    return [
        CheckpointRepository(storage or url, attempt=attempt, rank=rank, world_size=2, token=f"run{attempt}").save(
            state(step), step=step, rank_state={"rank": rank}
        )
        for rank in (0, 1)
    ]


def test_ranks_meet_in_the_store(url):
    assert gang(url, 3)[0] is None
    for rank in (0, 1):
        loaded = CheckpointRepository(url, attempt=2, rank=rank, world_size=2, token="run2").load_latest()
        check(loaded, 3)
        assert loaded.rank_state == {"rank": rank}


def test_two_ranks_that_commit_at_once_make_one_checkpoint(url):
    class Simultaneous(ObjectStorage):
        """Storage on which another rank commits the same checkpoint during the first copies."""

        raced = False

        def rename(self, source, target):
            if not self.raced:
                self.raced = True
                ObjectStorage(url).rename(source, target)
            super().rename(source, target)

    assert gang(url, 3, storage=Simultaneous(url))[0] is None
    check(CheckpointRepository(url, attempt=2).load_latest(), 3)


def test_a_rename_that_loses_its_source_to_a_faster_one_is_told_so(url):
    storage = ObjectStorage(url)
    storage.write(".staging-step-000000000001-a1-t/state.json", [b"1"])
    storage.write(".staging-step-000000000001-a1-t/manifest.json", [b"2"])
    real = storage._fs.cp_file

    class Late:
        def __getattr__(self, name):
            return getattr(fsspec.filesystem("memory"), name)

        def cp_file(self, source, target):
            ObjectStorage(url).rename(".staging-step-000000000001-a1-t", "step-000000000001-a1")
            real(source, target)

    storage._fs = Late()
    with pytest.raises(FileExistsError):
        storage.rename(".staging-step-000000000001-a1-t", "step-000000000001-a1")
    assert ObjectStorage(url).names("step-000000000001-a1") == ["manifest.json", "state.json"]
    with pytest.raises(FileNotFoundError):
        ObjectStorage(url).rename("nothing", "step-000000000009-a1")


def test_rank_0_decides_and_the_others_wait_for_it(url):
    gang(url, 3)
    second = CheckpointRepository(url, attempt=2, rank=1, world_size=2, token="run2")
    results = []
    thread = threading.Thread(target=lambda: results.append(second.load_latest().step))
    thread.start()
    gang(url, 4)  # whatever is saved meanwhile, rank 0's choice counts
    results.append(CheckpointRepository(url, attempt=2, rank=0, world_size=2, token="run2").load_latest().step)
    thread.join()
    assert results == [4, 4]


def test_a_rank_does_not_wait_for_ever(url):
    with pytest.raises(ResumeMismatchError, match="every rank must call load"):
        CheckpointRepository(url, attempt=2, rank=1, world_size=2, token="run2", wait_seconds=0.0).load_latest()


# The port


def test_the_port_on_an_object_store(url):
    storage = ObjectStorage(url)
    assert storage.names() == []
    record = storage.write("a/b", [b"one", memoryview(b"two"), b""])
    assert (storage.read("a/b"), storage.digest("a/b"), record.bytes) == (b"onetwo", record, 6)
    assert storage.create("note", b"1")
    assert not storage.create("note", b"2")
    storage.replace("note", b"3")
    assert (storage.read("note"), storage.names(), storage.names("a")) == (b"3", ["a", "note"], ["b"])
    storage.sync("a")
    with storage.lock() as held:
        assert not held
    assert (storage.free_bytes(), storage.location("a"), storage.location()) == (None, f"{url}/a", url)
    for path in ("a", "note", "nothing"):
        storage.remove(path)
    assert storage.names() == []
    with pytest.raises(FileNotFoundError):
        storage.read("a/b")


def test_urls_open_what_they_name(tmp_path, url):
    assert isinstance(open_storage(url), ObjectStorage)
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert open_storage(f"file://{tmp_path}").location() == str(tmp_path)
    with pytest.raises(CheckpointError, match=r"nonsense://x cannot be reached: .*nonsense"):
        open_storage("nonsense://x")


def test_a_store_whose_package_is_missing_says_which(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match="need the package fsspec"):
        open_storage("s3://bucket/x")
