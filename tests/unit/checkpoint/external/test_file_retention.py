"""Deletion of a script's own old files, and completion of an interrupted deletion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.external import script_files
from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints, RegistryFile, WatchSettings
from tests.unit.checkpoint.external.entries import entry_of


@pytest.fixture
def file(tmp_path: Path) -> RegistryFile:
    """Write a registry of three files, the newest of step 3."""
    file = RegistryFile(str(tmp_path / "registry"))
    registry = file.read()
    for step in (1, 2, 3):
        path = str(tmp_path / f"ckpt-{step}")
        Path(path).write_text(f"step {step}")
        registry["known"][path] = entry_of(path, step)
    file.write(registry)
    return file


def apply(file: RegistryFile, tmp_path: Path, keep: int | None) -> list[str]:
    registry = str(file.storage.root)
    settings = WatchSettings(pattern="ckpt-*", directory=str(tmp_path), registry=registry, keep=keep)
    return [Path(path).name for path in ExternalCheckpoints(settings).retain()]


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("ckpt-*"))


def test_older_ones_than_those_to_keep_are_deleted(file: RegistryFile, tmp_path: Path) -> None:
    assert apply(file, tmp_path, None) == []
    assert apply(file, tmp_path, 3) == []
    assert apply(file, tmp_path, 2) == ["ckpt-1"]
    assert left(tmp_path) == ["ckpt-2", "ckpt-3"]
    assert [Path(path).name for path in file.read()["known"]] == left(tmp_path)
    assert file.read()["removing"] == []


def test_nothing_is_deleted_while_the_newest_is_damaged(file: RegistryFile, tmp_path: Path) -> None:
    (tmp_path / "ckpt-3").write_text("step ?")
    assert apply(file, tmp_path, 1) == []
    assert left(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3"]


def test_a_deletion_is_on_record_before_it_begins_and_completed_later(
    file: RegistryFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []

    def die(_path: str) -> None:
        found.append(file.read())
        raise OSError("killed")

    real = script_files.delete
    monkeypatch.setattr(script_files, "delete", die)
    assert apply(file, tmp_path, 2) == ["ckpt-1"]
    assert [registry["removing"] for registry in found] == [[str(tmp_path / "ckpt-1")]]
    assert "ckpt-1" in left(tmp_path)
    monkeypatch.setattr(script_files, "delete", real)
    assert apply(file, tmp_path, 2) == []
    assert left(tmp_path) == ["ckpt-2", "ckpt-3"]
    assert file.read()["removing"] == []


def test_what_no_longer_matches_the_glob_is_not_deleted(file: RegistryFile, tmp_path: Path) -> None:
    registry = file.read()
    other = tmp_path / "precious"
    other.write_text("keep me")
    registry["removing"].append(str(other))
    file.write(registry)
    apply(file, tmp_path, None)
    assert other.read_text() == "keep me"
