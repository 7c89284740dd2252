"""Workdir archives while others make the same one, while files change, and while the disk is full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.daemon.submitting import archives as snapshot

LIMIT = 100_000_000


def blobs(tmp_path: Path) -> Callable[[str], Path]:
    return lambda digest: tmp_path / "blobs" / digest[:2] / digest


def strays(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "blobs").rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_many_may_take_the_same_directory_at_once(tmp_path: Path, size: int) -> None:
    source = tmp_path / "work"
    source.mkdir()
    (source / "train.py").write_bytes(os.urandom(size))
    together = threading.Barrier(8)

    def take(_number: int) -> str:
        together.wait(300)
        return snapshot.take(source, blobs(tmp_path), max_bytes=LIMIT).digest

    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(take, range(8)))
    assert len(digests) == 1
    assert strays(tmp_path) == []
    snapshot.lay_out(digests.pop(), blobs(tmp_path), tmp_path / "copy")
    assert (tmp_path / "copy" / "train.py").read_bytes() == (source / "train.py").read_bytes()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "work"
    source.mkdir()
    data = source / "data.bin"
    data.write_bytes(bytes(3_000_000))
    digest_of = snapshot._digest

    def then_changed(path: Path) -> str:
        digest = digest_of(path)
        with path.open("ab") as file:
            file.write(b"more")
        return digest

    monkeypatch.setattr(snapshot, "_digest", then_changed)
    with pytest.raises(snapshot.WorkdirError, match="changes while it is read; submit again"):
        snapshot.take(source, blobs(tmp_path), max_bytes=LIMIT)
    assert strays(tmp_path) == []


def test_a_full_disk_is_not_blamed_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "work"
    source.mkdir()
    (source / "train.py").write_text("print()")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot.take(source, blobs(tmp_path), max_bytes=LIMIT)
    assert strays(tmp_path) == []
