"""Copies into a slot: tensors that are copied at once, and tensors that are deferred."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint.snapshots.async_copy import WORTH_BYTES, Window
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory
from orchestrator.checkpoint.snapshots.slot_copier import SlotCopier
from orchestrator.checkpoint.snapshots.slot_pool import SlotPool
from orchestrator.checkpoint.snapshots.state_layout import StateLayout

LARGE, SMALL = WORTH_BYTES // 4 + 1, 10


class Fixture:
    """A copier for a large and a small tensor, and bytes."""

    def __init__(self, slots: SlotPool) -> None:
        self.large, self.small = torch.arange(LARGE, dtype=torch.float32), torch.ones(SMALL)
        self.layout = StateLayout()
        self.layout.update({"state": {"large": self.large, "small": self.small, "log": b"z" * 2000}})
        self.copier: SlotCopier = self.layout.copier(0, slots)

    def copied(self) -> bytes:
        """Return the current content of the slot's image."""
        (region,) = self.layout.regions()
        return bytes(self.copier.slot.memory[region.image_at : region.image_at + region.image_bytes])

    def window(self, *, rehearse: bool = False) -> Window:
        return Window(lambda: {self.large.data_ptr(), self.small.data_ptr()}, rehearse=rehearse)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Fixture]:
    pool = SlotPool(SnapshotDirectory(tmp_path / "snapshots"), 0)
    fixture = Fixture(pool)
    yield fixture
    fixture.layout.close()
    pool.close()


def test_without_a_window_everything_is_copied_at_once(made: Fixture) -> None:
    assert made.copier.copy(None) is None
    image = made.copied()
    assert made.large.numpy().tobytes() in image
    assert made.small.numpy().tobytes() in image
    assert b"z" * 2000 in image


def test_a_large_tensor_of_the_window_is_left_for_later(made: Fixture) -> None:
    late = made.copier.copy(made.window())
    assert late is not None
    assert [source.data_ptr() for source in late.sources] == [made.large.data_ptr()]
    image = made.copied()
    assert made.large.numpy().tobytes() not in image
    assert made.small.numpy().tobytes() in image
    assert late.copy()
    assert made.large.numpy().tobytes() in made.copied()


def test_in_a_rehearsal_it_is_copied_at_once_too(made: Fixture) -> None:
    late = made.copier.copy(made.window(rehearse=True))
    assert late is not None
    assert late.copied
    assert made.large.numpy().tobytes() in made.copied()
    assert late.is_unchanged()


def test_a_tensor_that_no_optimizer_owns_is_copied_at_once(made: Fixture) -> None:
    assert made.copier.copy(Window(lambda: {made.small.data_ptr()})) is None
    assert made.large.numpy().tobytes() in made.copied()
