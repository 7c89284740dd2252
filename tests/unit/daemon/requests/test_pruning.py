"""The numbers that pruning reports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.daemon.requests.pruning import _size


def test_what_another_prune_removes_meanwhile_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "kept").write_text("four")
    (tmp_path / "gone").write_text("gone, too")
    (tmp_path / "link").symlink_to(tmp_path / "inside" / "kept")
    lstat = Path.lstat

    def removed_before(path: Path) -> os.stat_result:
        if path.name == "gone":
            path.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removed_before)
    assert _size(tmp_path) == 4
