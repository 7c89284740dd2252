"""Conditions under which a checkpoint that nothing marks as finished counts as complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.external.completeness import (
    QUIET_SECONDS,
    SETTLE_SECONDS,
    CompletenessCheck,
    WriterEnd,
)
from orchestrator.checkpoint.external.file_facts import facts_of

NOW = 1_700_000_000.0


class Check:
    """A check of one path, at a time that the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = NOW
        self._check = CompletenessCheck(lambda: self.now)

    def __call__(
        self, *, writer: WriterEnd | None = None, is_copied: bool = False, previous: tuple[str, ...] = ()
    ) -> bool:
        facts = facts_of(str(self.path))
        return self._check.is_complete(
            str(self.path), facts, writer=writer or WriterEnd(), is_copied=is_copied, previous=lambda: previous
        )


def folder(tmp_path: Path, *names: str, at: float = NOW) -> Path:
    made = tmp_path / "ckpt"
    made.mkdir()
    for name in names:
        (made / name).write_bytes(b"content")
    for path in (*made.iterdir(), made):
        os.utime(path, (at, at))
    return made


def file(tmp_path: Path, *, at: float = NOW) -> Path:
    made = tmp_path / "ckpt.json"
    made.write_text(json.dumps({"step": 1}))
    os.utime(made, (at, at))
    return made


def test_it_is_complete_once_nothing_has_changed_for_a_while(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    assert not check()
    check.now += SETTLE_SECONDS / 2
    assert not check()
    check.now += SETTLE_SECONDS / 2
    assert check()


def test_a_change_begins_the_wait_anew(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    assert not check()
    check.now += SETTLE_SECONDS
    (check.path / "a").write_bytes(b"more content")
    assert not check()


def test_a_single_file_that_its_format_proves_complete_waits_only_until_a_copy_is_safe(tmp_path: Path) -> None:
    check = Check(file(tmp_path))
    assert not check(is_copied=True)
    check = Check(check.path)
    check.now += 2 * QUIET_SECONDS
    assert check(is_copied=True)
    assert not Check(check.path)(), "one that is not copied may still change"


def test_of_a_dead_writer_only_what_it_had_left_alone_counts_or_what_a_format_proves(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    assert not check(writer=WriterEnd(at=NOW + SETTLE_SECONDS / 2))
    assert check(writer=WriterEnd(at=NOW + SETTLE_SECONDS))
    assert Check(file(tmp_path))(writer=WriterEnd(at=NOW))


def test_what_a_writer_left_that_had_finished_is_complete(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    assert check(writer=WriterEnd(at=NOW, well=True), previous=("a", "b"))


def test_files_that_the_previous_one_had_are_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "shard-1"))
    check()
    check.now += SETTLE_SECONDS
    assert check(previous=("shard-7",)), "numbers are no difference"
    assert not check(previous=("shard-7", "state"))
    check.now += 20
    assert check(previous=("shard-7", "state"))


def test_a_torn_file_is_refused_whatever_its_writer_says(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.json"
    path.write_text('{"step"')
    with pytest.raises(CorruptCheckpointError):
        Check(path)(writer=WriterEnd(at=NOW, well=True))
