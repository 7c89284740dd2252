"""Readers of the files in a job's checkpoint directories and in its shared memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path

import torch

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.external import script_files
from orchestrator.checkpoint.format import codec, layout, tensorfile
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory, SnapshotReader
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter
from tests.fuzz.reader import Reader

PLACE = "/dev/shm"
STATE = {
    "w": torch.zeros(4),
    "step": 3,
    "rate": float("inf"),
    "key": (1, b"x", {2, 3}, torch.float16, torch.Size([2]), torch.device("cpu")),
    5: [complex(1, 2), 2**80],
}
META_AT = 128


# -- the manifest


def _manifests() -> list[bytes]:
    record = layout.FileRecord(bytes=3, sha256="ab" * 32)
    made = layout.Manifest(
        step=5, attempt=1, job_id="digits-abc234", world_size=2, created_at=1.7e9, ranks=(0, 1), metrics={"loss": 0.5, "n": float("nan")}, files={"state.json": record}
    )  # fmt: skip
    return [layout.render_manifest(made)]


def _sealed(data: bytes) -> bytes:
    """Return the bytes as they are; if they are a JSON object, as a manifest with the right digest of its own."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(body, dict):
        return data
    body.pop("sha256", None)
    return layout._text(body)


def _read_manifest(data: bytes) -> bool:
    accepted = False
    for text in (data, _sealed(data)):
        with contextlib.suppress(CorruptCheckpointError):
            found = layout.parse_manifest(text)
            again = layout.parse_manifest(layout.render_manifest(found))
            assert repr(again) == repr(found), "a manifest is written otherwise than it was read"
            assert found.total_bytes >= 0
            accepted = True
    return accepted


# -- tensors, and the state that holds them


@functools.cache
def _image() -> bytes:
    entries = tensorfile.plan([("w", "F32", (4,)), ("n", "I64", (2, 1))])
    return tensorfile.header(entries, {"a": "b"}) + bytes(entries[-1].end)


def _read_tensors(data: bytes) -> bool:
    try:
        entries, body = tensorfile.parse(data)
    except CorruptCheckpointError:
        return False
    assert all(0 <= entry.begin <= entry.end <= len(body) for entry in entries)
    return True


def _states() -> list[bytes]:
    return [codec.encode(STATE).text]


def _read_state(data: bytes) -> bool:
    entries, body = tensorfile.parse(bytearray(_image()))
    try:
        node = json.loads(data)
    except (ValueError, RecursionError):
        return False
    try:
        codec.decode(node, entries, body)
    except CorruptCheckpointError:
        return False
    return True


# -- snapshots


@functools.cache
def _slot() -> tuple[str, bytes]:
    """Return the name and the bytes of a slot that a rank has written."""
    with tempfile.TemporaryDirectory(dir=PLACE) as place:
        writer = SnapshotWriter(Path(place), rank=0, world_size=1, attempt=1, job_id="j", token="t")
        writer.save({"state": {"w": torch.zeros(4)}}, step=1, gang=False, wanted=True)
        writer.close()
        (slot,) = SnapshotDirectory(place).slots(0)
        return slot.path.name, slot.path.read_bytes()


def _descriptions() -> list[bytes]:
    _, whole = _slot()
    length, _ = struct.unpack_from("<II", whole, META_AT)
    return [whole[META_AT + 8 : META_AT + 8 + length]]


def _read_description(data: bytes) -> bool:
    """Read a slot with these bytes in place of its description, and the right checksum."""
    name, whole = _slot()
    told = data[:8000]
    head = whole[:META_AT] + struct.pack("<II", len(told), zlib.crc32(told)) + told
    return _read_slot(name, head + whole[len(head) :])


def _read_slot(name: str, content: bytes) -> bool:
    with tempfile.TemporaryDirectory(dir=PLACE) as place:
        (Path(place) / name).write_bytes(content)
        reader = SnapshotReader(place, job_id="j")
        version = reader.newest()
        if version is None:
            return False
        try:
            reader.load(version, 0, 1)
        except CorruptCheckpointError:
            return False
    return True


# -- checkpoints that scripts write themselves


def _external() -> list[bytes]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("archive/data.pkl", b"x" * 30)
    return [archive.getvalue(), _image(), b'{"step": 3}']


def _read_external(data: bytes) -> bool:
    accepted = False
    with tempfile.TemporaryDirectory(dir=PLACE) as place:
        for suffix in ("pt", "safetensors", "json"):
            path = Path(place) / f"model.{suffix}"
            path.write_bytes(data)
            with contextlib.suppress(CorruptCheckpointError):
                accepted |= script_files.check(str(path))
    return accepted


def _modules(*names: str) -> tuple[str, ...]:
    return tuple(f"orchestrator.checkpoint.{name}" for name in names)


def _raw_slot(data: bytes) -> bool:
    return _read_slot(_slot()[0], data)


READERS: tuple[Reader, ...] = (
    Reader("manifest", _read_manifest, _manifests, _modules("format.layout")),
    Reader("tensor-file", _read_tensors, lambda: [_image()], _modules("format.tensorfile")),
    Reader("state", _read_state, _states, _modules("format")),
    Reader("snapshot-description", _read_description, _descriptions, _modules("snapshots")),
    Reader("snapshot-slot", _raw_slot, lambda: [_slot()[1]], _modules("snapshots", "format")),
    Reader("external-checkpoint", _read_external, _external, _modules("external.script_files")),
)
