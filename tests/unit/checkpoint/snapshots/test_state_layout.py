"""The layout of a state's parts: kept while the parts fit, made again when they do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.snapshots.file import SnapshotDirectory
from orchestrator.checkpoint.snapshots.writer import SlotPool, StateLayout


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotPool]:
    pool = SlotPool(SnapshotDirectory(tmp_path / "snapshots"), 0)
    yield pool
    pool.close()


def state(step: int, *, size: int = 1000, note: str = "") -> dict[str, Any]:
    return {"step": step, "weight": torch.full((size,), float(step)), "note": note}


def test_a_copy_has_the_content_of_every_source_when_it_returns(slots: SlotPool) -> None:
    layout, large, small = StateLayout(), torch.arange(1 << 20, dtype=torch.float32), torch.ones(10)
    layout.update({"state": {"large": large, "small": small, "log": b"z" * 2000}})
    copier = layout.copier(0, slots)
    (region,) = layout.regions()
    for _ in range(2):
        copier.copy()
        image = bytes(copier.slot.memory[region.image_at : region.image_at + region.image_bytes])
        assert all(part in image for part in (large.numpy().tobytes(), small.numpy().tobytes(), b"z" * 2000))
        large += 1
    layout.close()


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


def test_a_tensor_of_another_type_in_as_many_stored_bytes_is_laid_out_anew(slots: SlotPool) -> None:
    layout = StateLayout()
    layout.update({"state": torch.zeros(2, dtype=torch.complex128)})
    layout.copier(0, slots).copy()
    other = torch.tensor([[1 + 2j], [3 - 1j]], dtype=torch.complex128)
    layout.update({"state": other})
    copier = layout.copier(0, slots)
    copier.copy()
    (region,) = layout.regions()
    assert other.numpy().tobytes() in bytes(copier.slot.memory[region.image_at : region.image_at + region.image_bytes])
    assert b"[2,1]" in copier.plans["state"].tree
    layout.close()
