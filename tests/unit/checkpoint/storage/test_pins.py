"""Pins keep another job's checkpoint for a job that starts from it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.storage.storage import pin


def saved(folder: Path) -> str:
    info = CheckpointRepository(folder, attempt=1).save({"step": 1}, step=1)
    assert info is not None
    return info.path


def test_a_pinned_checkpoint_outlives_its_own_job_and_takes_no_space(tmp_path: Path) -> None:
    path = saved(tmp_path / "old")
    kept = pin(path, tmp_path / "new")
    assert (Path(kept) / "state.json").samefile(Path(path) / "state.json")
    CheckpointRepository(tmp_path / "old", attempt=1).storage.discard(Path(path).name)
    assert CheckpointRepository(tmp_path / "x", attempt=1).load_path(kept).state == {"step": 1}


def test_where_links_do_not_reach_it_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "old")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    assert pin(path, tmp_path / "new") == path
    assert not (tmp_path / "new").exists()
    assert pin("s3://bucket/x", tmp_path / "new") == "s3://bucket/x"


def test_one_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        pin(str(tmp_path / "step-000000000001-a1"), tmp_path / "new")


def test_what_a_script_wrote_is_copied_as_it_may_be_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt-1"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    kept = Path(pin(str(folder), tmp_path / "new"))
    (folder / "a.txt").write_text("two")
    assert (kept / "a.txt").read_text() == "one"
    single = Path(pin(str(folder / "a.txt"), tmp_path / "newer"))
    assert single.read_text() == "two"
