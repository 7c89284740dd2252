"""The parts of the forked interpreter's set-up that can be tested without forking."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import launch
from orchestrator.runtime.forkserver.wire import parse


@pytest.mark.parametrize(
    ("text", "count"),
    [(None, None), ("", None), ("4", 4), (" 4 ", 4), ("4,2", 4), ("0", None), ("-1", None), ("many", None)],
)
def test_thread_counts_are_read_as_openmp_reads_them(text: str | None, count: int | None) -> None:
    assert launch._count(text) == count


@pytest.mark.parametrize(
    ("mode", "target", "expected"),
    [
        ("script", "train.py", "."),
        ("script", "sub/train.py", "sub"),
        ("script", "link.py", "sub"),
        ("script", "sub", "sub"),
        ("module", "pkg.mod", "."),
    ],
)
def test_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, target: str, expected: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    (tmp_path / "link.py").symlink_to("sub/train.py")
    monkeypatch.chdir(tmp_path)
    message = {"mode": mode, "target": target, "cwd": "/", "env": {}, "fds": ["stdout", "stderr", "lifeline"]}
    found = launch.search_path(parse(message, [1, 2, 3]))
    assert found == os.path.normpath(tmp_path / expected)
