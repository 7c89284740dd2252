"""Durable files on a file system that every rank sees."""

import errno
import hashlib
import os

import pytest

from orchestrator.checkpoint.storage.storage import DRAFT_PREFIX, LocalStorage


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "root")


def test_what_is_written_is_read_with_size_and_digest(storage):
    record = storage.write("a/b", [b"one", memoryview(b"two"), b"", bytes(9_000_000)])
    content = b"onetwo" + bytes(9_000_000)
    assert storage.read("a/b") == content
    assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert storage.digest("a/b") == record


def test_a_file_is_durable_before_write_returns(storage, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle))
    )
    storage.write("a/b", [b"x"])
    root = str(storage.root)
    assert synced[-1] == f"{root}/a/b"
    assert set(synced) == {os.path.dirname(root), f"{root}/a/b"}  # sync() and rename() sync the rest
    synced.clear()
    storage.write("a/c", [b"x"], durable=False)
    assert synced == []
    storage.sync("a")
    storage.rename("a", "z")
    assert synced == [f"{root}/a", root]


def test_create_succeeds_once(storage):
    assert storage.create("note", b"first")
    assert not storage.create("note", b"second")
    assert storage.read("note") == b"first"
    assert not [name for name in storage.names() if name.startswith(DRAFT_PREFIX)]


def test_rename_never_replaces_a_directory_with_content(storage):
    storage.write("a/x", [b"1"])
    storage.write("b/y", [b"2"])
    with pytest.raises(FileExistsError):
        storage.rename("a", "b")
    with pytest.raises(FileNotFoundError):
        storage.rename("nothing", "c")


def test_remove_takes_files_trees_and_nothing(storage):
    storage.write("tree/deep/file", [b"1"])
    storage.write("file", [b"1"])
    for path in ("tree", "file", "nothing"):
        storage.remove(path)
    assert storage.names() == []


def test_free_space_is_known_before_the_directory_exists(storage):
    assert storage.free_bytes() > 0
    assert not storage.root.exists()


def test_the_lock_excludes_and_gives_up_in_time(storage):
    other = LocalStorage(storage.root, lock_timeout_seconds=0.05)
    with storage.lock() as mine:
        assert mine
        with other.lock() as theirs:
            assert not theirs
    with other.lock() as theirs:
        assert theirs


def test_a_file_system_without_locks_is_told(storage, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with storage.lock() as held:
        assert not held
