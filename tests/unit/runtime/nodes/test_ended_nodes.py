"""Files that an ended node of an existing cluster leaves on a running machine are removed by the next node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.runtime.nodes.directories import RAYLET_PID, clear_ended_nodes, raylet_of


def node(parent: Path, name: str) -> Path:
    made = parent / name
    (made / "fork").mkdir(parents=True)
    return made


@pytest.fixture
def ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def noted(monkeypatch: pytest.MonkeyPatch, directory: Path, raylet: int) -> int | None:
    monkeypatch.setenv(RAYLET_PID, str(raylet))
    return raylet_of(directory)


def test_the_directories_of_ended_nodes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    mine, other, gone, serving, reused, unknown = (
        node(tmp_path, name) for name in ("mine", "other", "gone", "serving", "reused", "unknown")
    )
    for directory in (mine, other, gone, serving, reused):
        assert noted(monkeypatch, directory, os.getpid()) == os.getpid()
    for directory in (gone, serving):
        (directory / "raylet").write_text(f"{ended} 1")
    (reused / "raylet").write_text(f"{os.getpid()} 1")  # another process has its process id
    (serving / "fork" / "x.sock").touch()  # its fork server has not ended
    (mine / "raylet").write_text(f"{ended} 1")
    clear_ended_nodes(mine)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "other", "serving", "unknown"}
    assert unknown.is_dir(), "of an earlier version"


@pytest.mark.parametrize("content", ["", "x y", "1", "99999999999999999999 1", "\u0660 1"])
def test_what_is_no_note_says_nothing(tmp_path: Path, content: str) -> None:
    other = node(tmp_path, "other")
    (other / "raylet").write_text(content, encoding="utf-8")
    clear_ended_nodes(node(tmp_path, "mine"))
    assert other.is_dir() or content.startswith("999"), "a process that cannot be"


def test_an_embedded_head_s_node_outlives_its_raylets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(monkeypatch, node(tmp_path, "local"), os.getpid()) is None
    assert not (tmp_path / "local" / "raylet").exists()


def test_a_raylet_that_has_just_ended_is_named_and_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    assert noted(monkeypatch, node(tmp_path, "n"), ended) == ended
    assert not (tmp_path / "n" / "raylet").exists()
