"""A rank that truncates its own slots ends no other process: readers of the files report it, and continue."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CorruptCheckpointError
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
from orchestrator.checkpoint.snapshots.file import HEADER_BYTES, PIECE_BYTES, SnapshotDirectory, SnapshotSlot
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter

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
