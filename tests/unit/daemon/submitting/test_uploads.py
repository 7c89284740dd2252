"""Uploaded working directories: pieces match their names, and no manifest of a client leads out of its directory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.protocol import MAX_PIECE_BYTES
from orchestrator.daemon.submitting.archives import KEPT_SECONDS, PILE, Uploads

NOW = 1_000_000_000.0
UID = 1000
NONE = "0" * 64


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "uploads", max_bytes=1000)


def sent(uploads: Uploads, data: bytes, uid: int = UID) -> str:
    digest = hashlib.sha256(data).hexdigest()
    uploads.put(uid, digest, data)
    return digest


def manifest(uploads: Uploads, *entries: Any, version: Any = 1) -> list[str]:
    return [sent(uploads, json.dumps({"version": version, "entries": entries}).encode())]


def file(path: Any, digest: str = NONE, size: Any = 5, **more: Any) -> dict[str, Any]:
    return {"path": path, "type": "file", "size": size, "pieces": [digest], **more}


def link(path: str, target: str) -> dict[str, Any]:
    return {"path": path, "type": "link", "target": target}


def test_a_directory_is_laid_out_as_it_was_sent(uploads: Uploads) -> None:
    code = sent(uploads, b"print")
    entries = (
        file("train.py", code, executable=True),
        file("pkg/sub/a.py", code),
        {"path": "empty", "type": "file", "size": 0, "pieces": []},
        {"path": "data", "type": "directory"},
        link("pkg/up", "../train.py"),
        link("pkg/over", "sub/../up"),
        link("loop", "loop"),
        link("ring", "pkg/ring"),
        link("pkg/ring", "../ring"),
        link("away", "/mnt/data"),
    )
    directory = uploads.lay_out(UID, manifest(uploads, *entries))
    assert (directory / "pkg/sub/a.py").read_bytes() == b"print"
    assert (directory / "empty").read_bytes() == b""
    assert (directory / "data").is_dir()
    assert (directory / "pkg/up").read_bytes() == b"print"
    assert (directory / "pkg/over").read_bytes() == b"print"
    assert [os.readlink(directory / name) for name in ("loop", "ring", "away")] == ["loop", "pkg/ring", "/mnt/data"]
    assert (directory / "train.py").stat().st_mode & 0o777 == 0o700
    assert (directory / "pkg/sub/a.py").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o077 == 0
    uploads.remove(directory)
    assert not directory.exists()


def test_only_what_is_missing_is_asked_for_and_only_ones_own_counts(uploads: Uploads) -> None:
    here = sent(uploads, b"print")
    assert uploads.missing(UID, [here, NONE, NONE], 5, NOW) == (NONE,)
    assert uploads.missing(UID + 1, [here], 5, NOW) == (here,)
    with pytest.raises(BadRequestError, match="is not here"):
        uploads.lay_out(UID + 1, manifest(uploads, file("a", here)))


def test_pieces_of_a_day_ago_are_removed_and_those_asked_for_since_are_kept(uploads: Uploads, tmp_path: Path) -> None:
    old, kept = sent(uploads, b"old"), sent(uploads, b"kept")
    left = uploads.lay_out(UID, manifest(uploads))
    for digest in (old, kept):
        assert uploads.missing(UID, [digest], 1, NOW) == ()
    os.utime(left, (NOW, NOW))
    assert uploads.missing(UID, [kept], 1, NOW + KEPT_SECONDS) == ()
    assert uploads.missing(UID, [kept, old], 1, NOW + KEPT_SECONDS + 1) == (old,)
    assert not left.exists()
    names = {path.name for path in (tmp_path / "uploads" / str(UID)).rglob("*") if path.is_file()}
    assert kept in names
    assert old not in names


def test_a_piece_with_another_content_is_refused_and_not_kept(uploads: Uploads) -> None:
    with pytest.raises(BadRequestError, match="arrived as"):
        uploads.put(UID, NONE, b"other")
    assert uploads.missing(UID, [NONE], 1, NOW) == (NONE,)


@pytest.mark.parametrize("data", [b"", b"x" * (MAX_PIECE_BYTES + 1)])
def test_a_piece_has_a_size(uploads: Uploads, data: bytes) -> None:
    with pytest.raises(BadRequestError, match=f"a piece of {len(data)} bytes"):
        uploads.put(UID, hashlib.sha256(data).hexdigest(), data)


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "0" * 63, ""])
def test_a_piece_is_named_by_its_digest(uploads: Uploads, name: str) -> None:
    with pytest.raises(BadRequestError, match="64 hexadecimal digits"):
        uploads.put(UID, name, b"x")
    with pytest.raises(BadRequestError, match="64 hexadecimal digits"):
        uploads.lay_out(UID, [name])


def test_a_user_cannot_fill_the_disk(uploads: Uploads) -> None:
    for number in range(PILE):
        sent(uploads, bytes([number]) * 1000)
    with pytest.raises(RefusedError, match="your uploads hold"):
        sent(uploads, b"more")
    sent(uploads, b"another user's", uid=UID + 1)


def test_a_piece_that_goes_while_they_are_counted_counts_for_nothing(uploads: Uploads, tmp_path: Path) -> None:
    """Another request's draft is renamed between the listing and its stat; a dangling link stands for it here."""
    first = sent(uploads, b"first")
    (tmp_path / "uploads" / str(UID) / first[:2] / ".draft-gone").symlink_to(tmp_path / "gone")
    uploads.missing(UID, [first], 5, NOW)
    sent(uploads, b"second")


@pytest.mark.parametrize("path", [".git/config", "a/.git/hooks/pre-commit", ".venv/bin/python", ".git"])
def test_what_is_never_copied_is_refused(uploads: Uploads, path: str) -> None:
    named = manifest(uploads, {**file("a", sent(uploads, b"[core]")), "path": path})
    with pytest.raises(BadRequestError, match="never copied"):
        uploads.lay_out(UID, named)


def test_a_directory_over_the_limit_is_refused_before_it_is_sent(uploads: Uploads) -> None:
    with pytest.raises(RefusedError, match="the limit is"):
        uploads.missing(UID, [], 1001, NOW)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([file("../a")], "is not in the directory"),
        ([file("/etc/cron.d/a")], "is not in the directory"),
        ([file("a/./b")], "is not in the directory"),
        ([file("a//b")], "is not in the directory"),
        ([file("a\0b")], "is not in the directory"),
        ([file("x" * 256)], "is not in the directory"),
        ([file("/".join("a" * 66))], "directories deep"),
        ([file("a/" * 1100 + "b")], "at most 2048 bytes"),
        ([file(7)], "a path is text"),
        ([file("\ud800")], "is not UTF-8"),
        ([file("a"), file("a")], "names a path twice"),
        ([{"path": "a", "type": "link", "target": "b"}, file("a/x")], "is below 'a'"),
        ([link(".gitignore", "/etc/passwd")], "make it a file"),
        ([link("a", "../x")], "outside of the directory"),
        ([link("a", "b/../../x"), file("b/f")], "outside of the directory"),
        ([link("here", "."), link("a", "here/..")], "outside of the directory"),
        ([link("d/up", ".."), link("a", "d/up/../x"), file("d/f")], "outside of the directory"),
        ([link("out", "/etc"), link("a", "out/passwd")], "outside of the directory"),
        ([link("out", "/etc"), link("b", "out"), link("d/a", "../b/passwd")], "outside of the directory"),
        ([{"path": "a/b", "type": "link", "target": "../../x"}], "outside of the directory"),
        ([{"path": "a", "type": "link", "target": ""}], "has no valid target"),
        ([{"path": "a", "type": "fifo"}], "neither a file, a link nor a directory"),
        ([file("a", size=-1)], "has no size"),
        ([file("a", size=True)], "has no size"),
        ([file("a", size=1e3)], "has no size"),
        ([file("a", size=MAX_PIECE_BYTES + 1)], "1 pieces for"),
        ([file("a", size=2000)], "2000 bytes, 1000 at most"),
        (["a"], "not an object"),
    ],
)
def test_a_hostile_manifest_is_refused(uploads: Uploads, tmp_path: Path, entries: list[Any], reason: str) -> None:
    named = manifest(uploads, *entries)
    with pytest.raises(BadRequestError, match=reason):
        uploads.lay_out(UID, named)
    assert list((tmp_path / "uploads" / str(UID) / "trees").glob("*")) == []


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"version": 2, "entries": []}', b'{"version": 1}', b"[" * 100_000])
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: bytes) -> None:
    uploads = Uploads(tmp_path / "uploads", max_bytes=1_000_000)
    with pytest.raises(BadRequestError, match="manifest is refused"):
        uploads.lay_out(UID, [sent(uploads, text)])


@pytest.mark.parametrize("size", [4, 6])
def test_a_file_has_the_size_that_its_manifest_says(uploads: Uploads, tmp_path: Path, size: int) -> None:
    named = manifest(uploads, file("a", sent(uploads, b"print"), size=size))
    with pytest.raises(BadRequestError, match=f"a has {size} bytes, its pieces have 5"):
        uploads.lay_out(UID, named)
    assert list((tmp_path / "uploads" / str(UID) / "trees").glob("*")) == []
