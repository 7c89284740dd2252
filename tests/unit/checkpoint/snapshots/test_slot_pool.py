"""Slots of snapshots in shared memory: choice, layout, locked pages, and files that are cut short."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CorruptCheckpointError
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
from orchestrator.checkpoint.snapshots.file import HEADER_BYTES, PIECE_BYTES, SnapshotDirectory, SnapshotSlot, identity
from orchestrator.checkpoint.snapshots.writer import PageLocks, SlotPool, SnapshotWriter, StateLayout

SIZE = HEADER_BYTES + 4096


def word(step: int) -> int:
    return identity(Version(attempt=1, step=step))


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path / "snapshots")


def put(pool: SlotPool, index: int, step: int, *, wanted: bool = False) -> SnapshotSlot:
    slot = pool.of_size(index, SIZE)
    slot.begin()
    slot.want(word(step) if wanted else 0)
    slot.commit(word(step))
    return slot


def test_a_used_slot_is_chosen_before_a_new_one_and_never_the_newest(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    assert pool.choose(None) == 0
    put(pool, 0, 1)
    assert pool.choose(None) == 1, "the only one is the newest"
    put(pool, 1, 2)
    assert pool.choose(None) == 0, "the older one is used again"
    put(pool, 0, 3)
    assert pool.choose(None) == 1
    pool.close()


def test_a_held_snapshot_is_not_overwritten(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    put(pool, 0, 1)
    put(pool, 1, 2)
    directory.hold().set(word(1))
    assert pool.choose(None) == 2
    pool.close()


def test_a_choice_waits_for_storage_while_it_works_and_says_so_once(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    slots = [put(pool, index, step, wanted=True) for index, step in enumerate((1, 2, 3))]
    directory.store_state(0).serve(serving=True)
    waits: list[int] = []

    def store_the_oldest() -> None:
        waits.append(1)
        slots[0].mark_stored(word(1))

    assert pool.choose(store_the_oldest) == 0
    assert waits == [1]
    assert pool.waited_seconds > 0
    assert pool.left_out == []
    pool.close()


def test_a_choice_gives_the_oldest_up_where_storage_fails(directory: SnapshotDirectory) -> None:
    pool = SlotPool(directory, 0)
    for index, step in enumerate((1, 2, 3)):
        put(pool, index, step, wanted=True)
    assert pool.choose(None) == 0
    assert pool.left_out == [], "without a persister nothing was promised"
    state = directory.store_state(0)
    state.serve(serving=True)
    state.fail(failing=True)
    assert pool.choose(None) == 0
    assert pool.left_out == [1]
    assert pool.waited_seconds == 0.0
    pool.close()


def test_what_rank_0_wants_is_kept_by_every_rank_until_it_is_replaced(directory: SnapshotDirectory) -> None:
    leader, other = SlotPool(directory, 0), SlotPool(directory, 1)
    for pool in (leader, other):
        put(pool, 0, 1, wanted=pool is leader)
        put(pool, 1, 2)
    leader.want_instead(word(1), 0)
    assert (leader.choose(None), other.choose(None)) == (2, 2)
    leader.want_instead(word(2), word(1))
    assert directory.store_state(0).wanted() == {word(2)}
    assert (leader.choose(None), other.choose(None)) == (0, 0)
    leader.close()
    other.close()


# Runs in a separate process: the failure under test would end the whole suite.
PERSISTS = """
import os, sys
from pathlib import Path
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings

folder, root, names, size = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
persister = SnapshotPersister(folder, rank=0, settings=StoreSettings(root=root), interval_seconds=0.0)
assert persister.poll() or persister.poll(), persister.status
for path in folder.glob(names):
    os.truncate(path, size)
persister.poll()
persister.flush(0.0)
persister.poll()
persister.close()
print("goes on")
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save snapshots of two steps, the second wanted on storage; return their directory."""
    writer = SnapshotWriter(tmp_path / "snapshots", rank=0, world_size=1, attempt=1, job_id="j", token="t")
    for step in (1, 2):
        writer.save({"state": {"weight": torch.full((5000,), float(step))}}, step=step, gang=False, wanted=step == 2)
    writer.close()
    return tmp_path / "snapshots"


@pytest.mark.parametrize(
    ("names", "size"),
    [("*.snap", 0), ("*.snap", HEADER_BYTES - 1), ("*.snap", HEADER_BYTES + 5000), ("*.store", 70), ("hold", 0)],
)
def test_a_persister_outlives_files_that_are_cut_short(saved: Path, tmp_path: Path, names: str, size: int) -> None:
    command = [sys.executable, "-c", PERSISTS, str(saved), str(tmp_path / "store"), names, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
    good = CheckpointRepository(tmp_path / "store", attempt=2).latest_good()
    assert good is not None
    assert good.step == 2


def test_a_wanted_snapshot_that_is_cut_short_is_told_and_given_up(saved: Path, tmp_path: Path) -> None:
    for path in saved.glob("*.snap"):
        os.truncate(path, HEADER_BYTES)
    persister = SnapshotPersister(saved, rank=0, settings=StoreSettings(root=str(tmp_path / "store")))
    assert not persister.poll()
    assert "is damaged and was given up" in persister.status.failure
    assert not list(SnapshotDirectory(saved).snapshots(0))
    persister.close()


def test_a_slot_that_is_cut_short_while_it_is_read_is_an_error(saved: Path) -> None:
    path = min(saved.glob("*.snap"))
    os.truncate(path, HEADER_BYTES + 2 * PIECE_BYTES)
    slot = SnapshotSlot.open(path)
    assert slot is not None
    pieces = slot.pieces(HEADER_BYTES, 2 * PIECE_BYTES)
    assert len(next(pieces)) == PIECE_BYTES
    os.truncate(path, HEADER_BYTES)
    with pytest.raises(CorruptCheckpointError, match="was cut short while it was read"):
        next(pieces)


LOCKED_BYTES = 1 << 16


@dataclass
class Driver:
    """Stand-in that records its locks and counts the calls."""

    works: bool = True
    locked: dict[int, int] = field(default_factory=dict)
    asked: int = 0

    def lock(self, address: int, size: int) -> bool:
        self.asked += 1
        if self.works:
            self.locked[address] = size
        return self.works

    def unlock(self, address: int) -> bool:
        del self.locked[address]
        return True


@pytest.fixture
def slot(tmp_path: Path) -> SnapshotSlot:
    return SnapshotSlot.create(tmp_path / "slot", LOCKED_BYTES)


def test_a_slot_is_locked_once_as_a_whole(slot: SnapshotSlot) -> None:
    driver = Driver()
    locks = PageLocks(lambda: driver)
    locks.lock(slot)
    locks.lock(slot)
    assert driver.locked == {torch.frombuffer(slot.memory, dtype=torch.uint8).data_ptr(): LOCKED_BYTES}
    assert driver.asked == 1


def test_a_slot_that_goes_is_unlocked_first(tmp_path: Path) -> None:
    driver = Driver()
    locks = PageLocks(lambda: driver)
    made = SnapshotSlot.create(tmp_path / "slot", LOCKED_BYTES)
    locks.lock(made)
    memory = made.memory
    del made
    gc.collect()
    assert driver.locked == {}
    assert len(memory) == LOCKED_BYTES


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotPool]:
    pool = SlotPool(SnapshotDirectory(tmp_path / "snapshots"), 0)
    yield pool
    pool.close()


def state(step: int, *, size: int = 1000, note: str = "") -> dict[str, Any]:
    return {"step": step, "weight": torch.full((size,), float(step)), "note": note}


@pytest.mark.parametrize(
    "parts",
    [
        {"state": state(1, size=2000)},
        {"state": state(1, note="x" * 9000)},
        {"state": state(1), "rank-00000": 1},
        {"rank-00000": state(1)},
    ],
    ids=["larger tensor", "more text than there is room for", "another part", "another name"],
)
def test_what_no_longer_fits_is_laid_out_anew(slots: SlotPool, parts: dict[str, Any]) -> None:
    layout = StateLayout()
    layout.update({"state": state(1)})
    copier = layout.copier(0, slots)
    layout.update(parts)
    assert layout.copier(0, slots) is not copier
    assert [region.name for region in layout.regions()] == list(parts)
    layout.close()
