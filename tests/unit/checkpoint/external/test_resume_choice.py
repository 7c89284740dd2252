"""Choice of the job's own file that an attempt resumes from, and restoration of files from copies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.external import script_files
from orchestrator.checkpoint.external.external_checkpoints import OverwrittenFiles, RegistryFile, ResumeChoice
from orchestrator.checkpoint.external.script_files import facts_of
from tests.unit.checkpoint.external.entries import entry_of


class Files:
    """A job's JSON files, registered as a scan registers them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        file = RegistryFile(str(root / "registry"))
        self.registry = file.read()
        self.copies = OverwrittenFiles(file.storage)

    def add(self, name: str, step: int, *, copied: bool = False) -> str:
        path = str(self.root / name)
        Path(path).write_text(json.dumps({"step": step}))
        copy = self.copies.take(path, facts_of(path), self.registry) if copied else ""
        self.registry["known"][path] = entry_of(path, step, copy)
        return path

    def choice(self) -> ResumeChoice:
        return ResumeChoice(self.registry, self.copies, attempt=2)

    def entry(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.registry["known"][path]
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_newest_unchanged_one_is_chosen_and_a_changed_one_is_marked(files: Files) -> None:
    older, newer = files.add("ckpt-1.json", 1), files.add("ckpt-2.json", 2)
    assert files.choice().make() == newer
    Path(newer).write_text("{}")
    choice = files.choice()
    assert choice.make() == older
    assert [newer in problem for problem in choice.problems] == [True]
    assert files.entry(newer)["why"]
    again = files.choice()
    assert (again.make(), again.problems) == (older, []), "it is marked"


def test_a_torn_file_is_restored_from_its_copy(files: Files) -> None:
    path = files.add("ckpt.json", 2, copied=True)
    Path(path).write_text('{"st')
    choice = files.choice()
    assert choice.make() == path
    assert json.loads(Path(path).read_text()) == {"step": 2}
    assert [note.code for note in choice.notes] == ["checkpoint_restored"]
    assert "the copy of step 2 was restored" in choice.notes[0].message


def test_beside_a_file_that_may_be_complete_the_copy_is_used_in_its_own_place(files: Files) -> None:
    path = files.add("ckpt.json", 2, copied=True)
    Path(path).write_text("{}")
    choice = files.choice()
    assert choice.make() == str(files.copies.path(files.entry(path)))
    assert Path(path).read_text() == "{}"
    assert [note.code for note in choice.notes] == ["checkpoint_copy_used"]


def test_older_torn_files_are_restored_too(files: Files) -> None:
    older, newer = files.add("best.json", 1, copied=True), files.add("ckpt.json", 2, copied=True)
    Path(older).write_text('{"st')
    choice = files.choice()
    assert choice.make() == newer
    assert json.loads(Path(older).read_text()) == {"step": 1}
    assert choice.notes == []


def test_a_copy_that_cannot_be_put_back_is_used_in_its_own_place(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: str, _registry: dict[str, Any]) -> None:
        raise OSError(28, os.strerror(28))

    path = files.add("ckpt.json", 2, copied=True)
    Path(path).unlink()
    monkeypatch.setattr(files.copies, "put_back", full)
    choice = files.choice()
    assert choice.make() == str(files.copies.path(files.entry(path)))
    assert [os.strerror(28) in problem for problem in choice.problems] == [True]


def test_files_of_the_job_that_are_not_used_are_noted_and_those_from_before_it_are_not(files: Files) -> None:
    mine, foreign, removing = (str(files.root / name) for name in ("mine", "foreign", "removing"))
    for path in (mine, foreign, removing):
        Path(path).write_text("torn")
    files.registry["adopted"][foreign] = script_files.text(facts_of(foreign))
    files.registry["removing"].append(removing)
    choice = files.choice()
    assert choice.make() is None
    choice.note_unused([foreign, removing])
    assert choice.notes == []
    choice.note_unused([mine, foreign, removing])
    assert [(note.code, mine in note.message) for note in choice.notes] == [("checkpoint_unused", True)]
