"""A file of its own name is complete, or is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.durable_files import sync_tree, whole_file, write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_whole(path, b"first")
    write_whole(path, b"second", mode=0o640)
    assert path.read_bytes() == b"second"
    with pytest.raises(TypeError), whole_file(path) as file:
        file.write("half of it is no bytes")  # type: ignore[arg-type]
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"token": b"second"}


def test_content_then_name_then_directory_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        order.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name.rpartition('.')[2]}")
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        order.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_whole(tmp_path / "token", b"x")
    assert order == ["sync new", "rename", f"sync {tmp_path.name}"]


def test_a_tree_is_synced_below_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "tree"
    (root / "below").mkdir(parents=True)
    (root / "below" / "file").write_text("x")
    (root / "outside").symlink_to(tmp_path)
    (tmp_path / "other").write_text("not of the tree")
    os.mkfifo(root / "pipe")
    seen: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name))
    sync_tree(root)
    assert seen == ["file", "below", "tree", tmp_path.name]
