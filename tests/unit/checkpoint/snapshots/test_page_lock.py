"""Slots are page-locked once, and unlocked before their memory is freed."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.snapshots.file import SnapshotSlot
from orchestrator.checkpoint.snapshots.writer import PageLocks

SIZE = 1 << 16


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
    return SnapshotSlot.create(tmp_path / "slot", SIZE)


def test_a_slot_is_locked_once_as_a_whole(slot: SnapshotSlot) -> None:
    driver = Driver()
    locks = PageLocks(lambda: driver)
    locks.lock(slot)
    locks.lock(slot)
    assert driver.locked == {torch.frombuffer(slot.memory, dtype=torch.uint8).data_ptr(): SIZE}
    assert driver.asked == 1


def test_a_slot_that_goes_is_unlocked_first(tmp_path: Path) -> None:
    driver = Driver()
    locks = PageLocks(lambda: driver)
    made = SnapshotSlot.create(tmp_path / "slot", SIZE)
    locks.lock(made)
    memory = made.memory
    del made
    gc.collect()
    assert driver.locked == {}
    assert len(memory) == SIZE
