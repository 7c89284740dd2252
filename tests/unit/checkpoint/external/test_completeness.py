"""Conditions under which a checkpoint that nothing marks as finished counts as complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.external.external_checkpoints import (
    QUIET_SECONDS,
    SETTLE_SECONDS,
    CompletenessCheck,
    Writer,
)
from orchestrator.checkpoint.external.script_files import facts_of

NOW = 1_700_000_000.0


class Check:
    """A check of one path, at a time that the test sets. ``meanwhile`` is called while the check waits."""

    def __init__(self, path: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.now = 0.0
        self.paused: list[float] = []
        self._meanwhile = meanwhile
        self._check = CompletenessCheck(lambda: self.now, self._pause)

    def _pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self._meanwhile()

    def wait(self, seconds: float, **how: tuple[str, ...]) -> bool:
        """Look every half second for so long; return what the last look says."""
        found = False
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            found = self(**how)
        return found

    def __call__(
        self, *, writer: Writer | None = None, is_copied: bool = False, previous: tuple[str, ...] = ()
    ) -> bool:
        facts = facts_of(str(self.path))
        return self._check.is_complete(
            str(self.path), facts, writer=writer or Writer(), is_copied=is_copied, previous=lambda: previous
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
    assert not check.wait(SETTLE_SECONDS / 2)
    assert check.wait(SETTLE_SECONDS / 2)


def test_a_change_begins_the_wait_anew(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    check.wait(SETTLE_SECONDS - 0.5)
    (check.path / "a").write_bytes(b"more content")
    assert not check.wait(SETTLE_SECONDS)
    assert check.wait(0.5)


@pytest.mark.parametrize("age", [-1e6, 0.0, 1e6])
def test_the_files_own_times_are_no_evidence(tmp_path: Path, age: float) -> None:
    """They are of a file server, whose clock may be ahead of this node's, or behind it."""
    check = Check(folder(tmp_path, "a", at=NOW - age))
    assert not check()
    assert not check.wait(SETTLE_SECONDS - 0.5)
    assert not check(writer=Writer(ended=True)), "however old it looks, it may have been cut short"
    assert check.wait(0.5)


def test_the_time_for_which_this_process_was_stopped_is_not_counted(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    check()
    check.now += 1000.0  # the writer may have been killed meanwhile
    assert not check()


def test_a_single_file_that_its_format_proves_complete_waits_only_until_a_copy_is_safe(tmp_path: Path) -> None:
    check = Check(file(tmp_path))
    assert check(is_copied=True)
    assert check.paused == [QUIET_SECONDS]
    assert not Check(check.path)(), "one that is not copied may still change"
    check = Check(check.path, meanwhile=lambda: check.path.write_text('{"step": 12}'))
    assert not check(is_copied=True)


def test_of_a_dead_writer_only_what_a_format_proves_counts(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    assert not check(writer=Writer(ended=True))
    assert Check(file(tmp_path))(writer=Writer(ended=True))


def test_what_a_writer_left_that_had_finished_is_complete(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "a"))
    assert check(writer=Writer(ended=True, well=True), previous=("a", "b"))


def test_files_that_the_previous_one_had_are_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    check = Check(folder(tmp_path, "shard-1"))
    check()
    assert check.wait(SETTLE_SECONDS, previous=("shard-7",)), "numbers are no difference"
    assert not check.wait(15, previous=("shard-7", "state"))
    assert check.wait(5, previous=("shard-7", "state"))


def test_a_torn_file_is_refused_whatever_its_writer_says(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.json"
    path.write_text('{"step"')
    with pytest.raises(CorruptCheckpointError):
        Check(path)(writer=Writer(ended=True, well=True))
