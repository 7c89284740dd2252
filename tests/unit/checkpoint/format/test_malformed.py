"""Malformed checkpoints that no version has written: each is set aside, and the one before is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from orchestrator.checkpoint import CheckpointRepository, CheckpointStatus
from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import codec, tensorfile
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory, SnapshotReader
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter

DEEP: Any = "[" * 100_000 + "]" * 100_000
TREES = {
    "a type by another name": {"$": "torch.dtype", "v": "load"},
    "a module of torch": {"$": "torch.dtype", "v": "_dynamo"},
    "a type that is no text": {"$": "torch.dtype", "v": ["float32"]},
    "a device that is none": {"$": "torch.device", "v": "nowhere:-5"},
    "a size of text": {"$": "torch.Size", "v": "abc"},
    "a size beyond numbers": {"$": "torch.Size", "v": [2**80]},
    "an unknown type": {"$": "os.system", "v": "true"},
    "a type that is a list": {"$": ["tensor"], "n": "w"},
    "a float of one byte": {"$": "float", "v": "00"},
    "a complex of one byte": {"$": "complex", "v": "00"},
    "an int that is none": {"$": "int", "v": "zz"},
    "bytes that are no base64": {"$": "bytes", "v": "a"},
    "a dictionary in a dictionary's key": {"$": "dict", "v": [[{"a": 1}, 2]]},
    "a set of lists": {"$": "set", "v": [[1]]},
    "pairs that are none": {"$": "odict", "v": [1, 2]},
    "an array of objects": {"$": "numpy", "d": "|O8", "v": "00" * 8},
    "an array of structures": {"$": "numpy", "d": "i4,f8", "v": "00" * 12},
    "a number of no type": {"$": "numpy", "d": None, "v": "00"},
    "a tensor that is not there": {"$": "tensor", "n": "other"},
    "a tensor of a type that is a function": {"$": "tensor", "n": "w", "d": "load", "s": [4]},
    "a tensor of another shape": {"$": "tensor", "n": "w", "s": [10**30]},
    "a sharded tensor of text": {"$": "sharded", "k": "w", "s": "ab", "d": "float32"},
    "a sharded tensor of no type": {"$": "sharded", "k": "w", "s": [2], "d": "load"},
    "a sharded tensor without pieces": {"$": "sharded", "k": "w", "s": [2], "d": "float32"},
}


def store(folder: Path) -> CheckpointRepository:
    return CheckpointRepository(folder, attempt=1)


def forge(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and put its new checksum into the manifest."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    seal(path, manifest)


def seal(path: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(manifest, separators=(",", ":")).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest}, indent=1) + "\n")


def two(folder: Path) -> Path:
    """Save checkpoints of steps 1 and 2; return the newer one's directory."""
    for step in (1, 2):
        info = store(folder).save({"w": torch.zeros(4), "step": step}, step=step)
    assert info is not None
    return Path(info.path)


def loads_the_one_before(folder: Path) -> None:
    checkpoint = CheckpointRepository(folder, attempt=2)
    loaded = checkpoint.load_latest()
    assert loaded is not None
    assert loaded.step == 1
    (told,) = checkpoint.quarantined
    assert told.startswith("step-000000000002-a1: ")
    assert [info.status for info in checkpoint.list()].count(CheckpointStatus.BROKEN) == 1


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_a_state_that_makes_no_sense_is_set_aside(tmp_path: Path, tree: Any) -> None:
    forge(two(tmp_path), "state.json", json.dumps({"w": {"$": "tensor", "n": "w"}, "x": tree}).encode())
    loads_the_one_before(tmp_path)


@pytest.mark.parametrize("text", [DEEP.encode(), b"\xff\xfe", b"", b"NaN NaN"], ids=["deep", "bytes", "empty", "two"])
def test_a_state_that_is_no_json_is_set_aside(tmp_path: Path, text: bytes) -> None:
    forge(two(tmp_path), "state.json", text)
    loads_the_one_before(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        DEEP.encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}).encode(),
        json.dumps({"w": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}).encode(),
        json.dumps({"w": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}).encode(),
        json.dumps([1, 2]).encode(),
    ],
    ids=["deep", "negative", "boolean", "fraction", "type", "list"],
)
def test_a_tensor_file_that_makes_no_sense_is_set_aside(tmp_path: Path, header: bytes) -> None:
    forge(two(tmp_path), "state.safetensors", struct.pack("<Q", len(header)) + header + bytes(16))
    loads_the_one_before(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "2"),
        ("step", True),
        ("attempt", 1.0),
        ("world_size", -1),
        ("created_at", "now"),
        ("created_at", 1e999),
        ("ranks", ["0"]),
        ("ranks", 5),
        ("metrics", {"loss": [1]}),
        ("metrics", [1]),
        ("job_id", None),
        ("files", {"state.json": 5}),
        ("files", {"../../../etc/passwd": {"bytes": 1, "sha256": "0"}}),
        ("files", {"state.json": {"bytes": 1e300, "sha256": "0"}}),
        ("files", {"state.json": {"bytes": 1, "sha256": None}}),
    ],
)
def test_a_manifest_that_makes_no_sense_is_set_aside(tmp_path: Path, name: str, value: Any) -> None:
    path = two(tmp_path)
    seal(path, {**json.loads((path / "manifest.json").read_bytes()), name: value})
    assert [info.status for info in store(tmp_path).list()] == [CheckpointStatus.BROKEN, CheckpointStatus.COMPLETE]
    loads_the_one_before(tmp_path)


def test_only_types_of_the_table_are_stored_and_restored() -> None:
    names = [*tensorfile.TORCH_TYPES, *tensorfile.OTHER_TORCH_TYPES]
    for name in names:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            back = codec.decode({"$": "torch.dtype", "v": name}, (), memoryview(b""))
            assert back is dtype
    known = {getattr(torch, name) for name in names if hasattr(torch, name)}
    assert {getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)} <= known


def test_a_lack_of_memory_is_no_fault_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two(tmp_path)

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(codec, "restore", no_memory)
    again = CheckpointRepository(tmp_path, attempt=2)
    with pytest.raises(MemoryError):
        again.load_latest()
    assert again.quarantined == ()


@pytest.mark.parametrize(
    "change",
    [
        {"parts": [["../../escape", 16384, 10, 20480, 10]]},
        {"parts": [["state", -1, 10, 20480, 10]]},
        {"parts": [["state", 0, 2**60, 20480, 10]]},
        {"parts": [["state", "0", 1, 2, 3]]},
        {"parts": "state"},
        {"token": "../../elsewhere"},
        {"token": 5},
        {"metrics": {"loss": "much"}},
        {"metrics": []},
        {"created_at": "now"},
        {"world_size": "1"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_description_in_memory_that_makes_no_sense_is_no_snapshot(tmp_path: Path, change: dict[str, Any]) -> None:
    folder, root = tmp_path / "snapshots", tmp_path / "checkpoints"
    writer = SnapshotWriter(folder, rank=0, world_size=1, attempt=1, job_id="j", token="t")
    writer.save({"state": {"w": torch.zeros(4)}}, step=1, gang=False, wanted=True)
    writer.close()
    (slot,) = SnapshotDirectory(folder).slots(0)
    length, _ = struct.unpack_from("<II", slot.memory, 128)
    body = msgspec.msgpack.decode(slot.memory[136 : 136 + length])
    raw = msgspec.msgpack.encode({**body, **change})
    slot.memory[136 : 136 + len(raw)] = raw
    import zlib

    struct.pack_into("<II", slot.memory, 128, len(raw), zlib.crc32(raw))
    assert SnapshotReader(folder, job_id="j").newest() is None
    one = SnapshotPersister(folder, rank=0, settings=StoreSettings(root=str(root)))
    assert not one.poll()
    assert "damaged" in one.status.failure
    assert not root.exists()
    assert not list(tmp_path.rglob("*escape*"))


def test_pieces_that_make_no_sense_are_corrupt() -> None:
    from orchestrator.checkpoint.format.sharded import ShardedLeaf, join, pieces_of

    state = {"w": ShardedLeaf(key="w", shape=(4,), dtype="float32")}
    for piece in (
        {"key": "w"},
        "w",
        {"key": "w", "tensor": torch.zeros(4), "offsets": [1]},
        {"key": "w", "tensor": torch.zeros(4), "offsets": [-4]},
        {"key": "w", "tensor": torch.zeros(4), "offsets": [0, 0]},
    ):
        with pytest.raises(CorruptCheckpointError):
            join(state, lambda piece=piece: [piece])  # type: ignore[misc]
    with pytest.raises(CorruptCheckpointError):
        pieces_of({"key": "w"})


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "state.safetensors"])
def test_a_file_that_has_grown_is_not_read_into_memory(tmp_path: Path, name: str) -> None:
    newest = two(tmp_path)
    os.truncate(newest / name, 2**42)  # sparse: it takes no disk space, and exceeds any memory
    loads_the_one_before(tmp_path)


@pytest.mark.parametrize(
    "text", [DEEP, '{"attempt": 1e400}', '{"attempt": "2"}', '{"attempt": -5}', "[]", "\0", f'{{"attempt": {10**30}}}']
)
def test_a_fence_that_makes_no_sense_keeps_no_attempt_out(tmp_path: Path, text: str) -> None:
    two(tmp_path)
    (tmp_path / "fence.json").write_text(text)
    saved = store(tmp_path).save({"w": torch.zeros(4)}, step=3)
    assert saved is not None
    assert saved.step == 3
