"""Any damage to the files of a checkpoint is detected, and the one before is used instead."""

import errno
import os
import random
import shutil

import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CheckpointStatus
from tests.unit.checkpoint.faulty import FaultyStorage

STATE = {"weight": torch.arange(20.0), "list": [1, "two", 3.0], "bytes": b"x" * 2000}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Make a directory with checkpoints of steps 1 and 2 of a two-rank job."""
    root = tmp_path_factory.mktemp("pristine")
    for step in (1, 2):
        for rank in (0, 1):
            store = CheckpointRepository(root, attempt=1, rank=rank, world_size=2, token="t", keep=None)
            store.save(
                {**STATE, "step": step},
                step=step,
                rank_state={"rank": rank, "seed": torch.arange(4)},
                metrics={"loss": 0.5},
            )
    return root


@pytest.fixture
def root(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "copy")
    return tmp_path / "copy"


FILES = [
    "manifest.json",
    "state.json",
    "state.safetensors",
    "rank-00000.json",
    "rank-00000.safetensors",
    "rank-00001.json",
    "rank-00001.safetensors",
]


def falls_back(root):
    store = CheckpointRepository(root, attempt=2, rank=0, world_size=2, token="u")
    loaded = store.load_latest()
    assert len(store.quarantined) == 1
    return loaded.step == 1 and loaded.state["step"] == 1 and (root / "step-000000000002-a1.broken").is_dir()


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(root, name):
    os.unlink(root / "step-000000000002-a1" / name)
    assert falls_back(root)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_truncated_file_is_noticed(root, name, keep):
    path = root / "step-000000000002-a1" / name
    path.write_bytes(path.read_bytes()[:keep])
    assert falls_back(root)


@pytest.mark.parametrize("name", FILES)
def test_a_longer_file_is_noticed(root, name):
    with open(root / "step-000000000002-a1" / name, "ab") as file:
        file.write(b"\n")
    assert falls_back(root)


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_place_of_a_file_is_noticed(root, name):
    path = root / "step-000000000002-a1" / name
    os.unlink(path)
    os.mkdir(path)
    assert falls_back(root)


@pytest.mark.parametrize("name", ["extra.bin", "rank-00002.json", "manifest.json.bak"])
def test_a_file_too_many_is_noticed(root, name):
    (root / "step-000000000002-a1" / name).write_bytes(b"")
    assert falls_back(root)


def test_leftovers_of_a_network_file_system_are_no_damage(root):
    (root / "step-000000000002-a1" / ".nfs0001").write_bytes(b"")
    assert CheckpointRepository(root, attempt=2, world_size=2, token="u").load_latest().step == 2


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_noticed(root, name):
    """A sample of each file's bits is flipped; test_manifest.py flips every bit of a manifest."""
    folder = root / "step-000000000002-a1"
    store = CheckpointRepository(root, attempt=2, world_size=2, token="u")
    info = store.list()[0]
    pristine = (folder / name).read_bytes()
    for bit in random.Random(name).sample(range(8 * len(pristine)), 200):
        damaged = bytearray(pristine)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(damaged)
        assert store.verify(info).status is CheckpointStatus.BROKEN, f"bit {bit} of {name}"
    (folder / name).write_bytes(pristine)
    assert store.verify(info).status is CheckpointStatus.COMPLETE


def test_parts_of_two_checkpoints_do_not_mix(root):
    shutil.copy(root / "step-000000000001-a1" / "state.json", root / "step-000000000002-a1" / "state.json")
    assert falls_back(root)


def test_a_sector_that_cannot_be_read_is_damage(root):
    storage = FaultyStorage(root, fail_reads=("2-a1/state.safetensors", errno.EIO))
    store = CheckpointRepository(storage, attempt=2, world_size=2, token="u")
    assert store.load_latest().step == 1
    assert "cannot be read" in store.quarantined[0]


@pytest.mark.parametrize("file", ["state.json", "rank-00001.json", "manifest.json"])
def test_storage_out_of_reach_is_no_damage(root, file):
    """An unreachable share, or a missing permission, must not quarantine a good checkpoint."""
    storage = FaultyStorage(root, fail_reads=(file, errno.EACCES))
    with pytest.raises(PermissionError):
        CheckpointRepository(storage, attempt=2, world_size=2, token="u").load_latest()
    assert CheckpointRepository(root, attempt=2, world_size=2, token="u").load_latest().step == 2


def test_one_that_cannot_be_renamed_is_still_passed_over(root):
    os.unlink(root / "step-000000000002-a1" / "state.json")
    storage = FaultyStorage(root)
    storage.rename = lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "read-only"))
    store = CheckpointRepository(storage, attempt=2, world_size=2, token="u")
    assert store.load_latest().step == 1
