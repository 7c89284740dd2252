"""Ignore files of a working directory: the cost of their patterns, and other kinds of files in their place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.daemon.submitting import archives as snapshot

if TYPE_CHECKING:
    from pathlib import Path

STARS = "*a*a*a*a*a*a*a*a*a*a*a*a*b"


def test_a_pattern_of_many_stars_holds_nothing_up(tmp_path: Path) -> None:
    """A backtracking matcher would not end on this pattern."""
    (tmp_path / ".gitignore").write_text(f"{STARS}\n*.bin\n")
    (tmp_path / ("a" * 250)).write_text("")
    (tmp_path / "weights.bin").write_text("")
    assert snapshot.measure(tmp_path)[0] == 2


def test_an_ignore_file_that_is_a_fifo_is_told(tmp_path: Path) -> None:
    """Reading it would block for ever."""
    os.mkfifo(tmp_path / ".orchignore")
    with pytest.raises(snapshot.WorkdirError, match=r"\.orchignore: it is not a regular file"):
        snapshot.measure(tmp_path)


def test_an_ignore_file_that_is_too_long_is_told(tmp_path: Path) -> None:
    """The limit is 10,000 patterns."""
    (tmp_path / ".gitignore").write_text("".join(f"name-{number}\n" for number in range(10_001)))
    with pytest.raises(snapshot.WorkdirError, match="more than 10000 patterns"):
        snapshot.measure(tmp_path)


def test_an_ignore_file_may_be_a_link(tmp_path: Path) -> None:
    """Many repositories link to a shared file."""
    (tmp_path / "shared").write_text("*.bin\n")
    (tmp_path / ".gitignore").symlink_to("shared")
    (tmp_path / "weights.bin").write_text("")
    assert snapshot.measure(tmp_path)[0] == 2
