"""Deferred copies: conditions under which the snapshot counts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.snapshots.async_copy import Watch
from orchestrator.checkpoint.snapshots.file import HEADER_BYTES, SnapshotSlot
from orchestrator.checkpoint.snapshots.late_copy import Late, LateCopies
from orchestrator.checkpoint.snapshots.tensor_copy import TensorCopy

WORD = 7


class Broken(TensorCopy):
    def copy(self, sources: Any) -> None:
        raise ValueError("a tensor was replaced")


def late(source: torch.Tensor, kind: Callable[..., TensorCopy] = TensorCopy) -> Late:
    return Late(kind([torch.zeros_like(source)], threads=1, pool=None), [source], Watch([source]), copied=False)


@pytest.fixture
def slot(tmp_path: Path) -> SnapshotSlot:
    made = SnapshotSlot.create(tmp_path / "rank-00000.0.snap", HEADER_BYTES)
    made.begin()
    return made


def test_a_snapshot_counts_once_its_late_tensors_are_copied(slot: SnapshotSlot) -> None:
    source, copies = torch.arange(100.0), LateCopies()
    work = late(source)
    copied = copies.begin(slot, work, WORD).result()
    copies.close()
    assert (copied.failure, slot.identity()) == ("", WORD)
    assert torch.equal(work.copier.targets[0], source)


def test_a_snapshot_does_not_count_when_a_tensor_changed_meanwhile(slot: SnapshotSlot) -> None:
    source, copies = torch.arange(100.0), LateCopies()
    work = late(source)
    source += 1
    copied = copies.begin(slot, work, WORD).result()
    copies.close()
    assert "was changed while it was being copied" in copied.failure
    assert slot.identity() == 0


def test_an_error_of_the_copy_is_a_failure_of_the_snapshot_alone(slot: SnapshotSlot) -> None:
    copies = LateCopies()
    copied = copies.begin(slot, late(torch.arange(100.0), Broken), WORD).result()
    copies.close()
    assert "could not be copied while training went on: a tensor was replaced" in copied.failure
    assert slot.identity() == 0


def test_where_no_thread_can_be_started_the_copy_is_made_at_once(slot: SnapshotSlot) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    done = LateCopies(executor).begin(slot, late(torch.arange(100.0)), WORD)
    assert done.done()
    assert (done.result().failure, slot.identity()) == ("", WORD)


def test_a_rehearsal_is_unchanged_while_its_tensors_are() -> None:
    source = torch.arange(100.0)
    work = late(source)
    work.copier.copy([source])
    assert work.is_unchanged()
    source[50] = -1
    assert not work.is_unchanged()
