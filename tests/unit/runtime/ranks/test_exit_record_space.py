"""Space for an exit record is kept on a disk that stays full, attempt after attempt."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from orchestrator.runtime.forkserver import keeper
from orchestrator.runtime.ranks.exit_record_space import SPACE_BYTES, SUFFIX, preallocate
from tests.support.disks import fill, small_disk

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 3


def record(home: Path, attempt: int, rank: int) -> Path:
    """Return the path of a rank's exit record."""
    return home / "exits" / f"attempt-{attempt}" / f"rank-{rank}.json"


def end(path: Path, text: str) -> None:
    """Write the record as the rank's keeper does."""
    keeper._write_durably(str(path), json.dumps(text).encode())


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_every_attempt_on_a_full_disk_leaves_its_record(tmp_path: Path, kind: str) -> None:
    with small_disk(tmp_path, 8, kind=kind) as disk:
        for attempt in range(1, 31):
            for rank in range(RANKS):
                preallocate(record(disk, attempt, rank))
            for rank in range(RANKS):
                assert not record(disk, attempt, rank).exists(), "of an attempt that runs there is no record"
            fill(disk)  # from the first attempt on, nothing else can be written
            for rank in range(RANKS):
                end(record(disk, attempt, rank), f"attempt {attempt} rank {rank}")
            fill(disk)
            for number in range(max(1, attempt - 1), attempt + 1):
                for rank in range(RANKS):
                    assert json.loads(record(disk, number, rank).read_text()) == f"attempt {number} rank {rank}"
        assert len(list((disk / "exits").iterdir())) <= 3


def test_ranks_that_start_at_once_all_have_room(tmp_path: Path) -> None:
    with small_disk(tmp_path, 8, kind="ext4") as disk, ThreadPoolExecutor(8) as ranks:
        for attempt in range(1, 21):
            list(ranks.map(lambda rank, attempt=attempt: preallocate(record(disk, attempt, rank)), range(8)))
            fill(disk)
            list(ranks.map(lambda rank, attempt=attempt: end(record(disk, attempt, rank), "over"), range(8)))
            assert all(record(disk, attempt, rank).exists() for rank in range(8))


def test_a_second_start_of_an_attempt_has_no_record_of_the_first(tmp_path: Path) -> None:
    path = record(tmp_path, 1, 0)
    preallocate(path)
    end(path, "over")
    preallocate(path)
    assert not path.exists()
    assert path.with_name(path.name + SUFFIX).stat().st_size == SPACE_BYTES


def test_the_records_of_old_attempts_make_room_for_new_ones(tmp_path: Path) -> None:
    for attempt in range(1, 9):
        path = record(tmp_path, attempt, 0)
        path.parent.mkdir(parents=True)
        path.write_text(f"attempt {attempt}")
    preallocate(record(tmp_path, 9, 0))
    assert record(tmp_path, 8, 0).read_text() == "attempt 8"
    assert not record(tmp_path, 9, 0).exists()
    assert not record(tmp_path, 1, 0).exists()


@pytest.mark.parametrize("what", ["fifo", "link", "directory"])
def test_what_a_script_puts_in_its_place_is_not_written_to(tmp_path: Path, what: str) -> None:
    path, other = record(tmp_path, 1, 0), tmp_path / "other"
    other.write_text("mine")
    preallocate(path)
    room = path.with_name(path.name + SUFFIX)
    room.unlink()
    {"fifo": lambda: os.mkfifo(room), "link": lambda: room.symlink_to(other), "directory": room.mkdir}[what]()
    end(path, "over")
    assert json.loads(path.read_text()) == "over"
    assert other.read_text() == "mine"


def test_a_long_error_is_cut_where_there_is_no_room_for_it() -> None:
    error = {"type": "ValueError", "message": "m" * 5000, "traceback": "t" * 60_000, "at": 1.0}
    short = keeper._shortened(error)
    assert short == {"type": "ValueError", "message": "m" * 200, "traceback": "", "at": 1.0}
    assert keeper._shortened(None) is None
