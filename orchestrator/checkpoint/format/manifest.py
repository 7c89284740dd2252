"""The manifest: the files of a checkpoint, written last. Pure: text in, values out.

A manifest holds size and SHA-256 of every other file, and a digest of its own body. Its text is canonical: a file that
differs in any byte from what would be written is damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "orch-checkpoint"
_MOST = 2**63
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file's size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint. ``ranks`` lists the ranks with a part of their own; ``created_at`` is a wall time."""

    step: int
    attempt: int
    job_id: str
    world_size: int
    created_at: float
    ranks: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())


def render(manifest: Manifest) -> bytes:
    """Return the manifest as canonical JSON text."""
    body = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "job_id": manifest.job_id,
        "world_size": manifest.world_size,
        "created_at": manifest.created_at,
        "ranks": list(manifest.ranks),
        "metrics": {name: value if math.isfinite(value) else repr(value) for name, value in manifest.metrics.items()},
        "files": render_files(manifest.files),
    }
    return _text(body)


def parse(raw: bytes | bytearray | memoryview) -> Manifest:
    """Parse what ``render`` wrote. Raises CorruptCheckpointError for anything else."""
    try:
        body = json.loads(bytes(raw))
        claimed = body.pop("sha256")
        version = body.get("version")
        if body.get("format") != FORMAT or type(version) is not int or version != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"manifest: not {FORMAT} version {FORMAT_VERSION}; read it with the orch that wrote it"
            )
        _check_types(body)
        manifest = Manifest(
            step=body["step"],
            attempt=body["attempt"],
            job_id=body["job_id"],
            world_size=body["world_size"],
            created_at=body["created_at"],
            ranks=tuple(body["ranks"]),
            metrics={name: float(value) for name, value in body["metrics"].items()},
            files=parse_files(body["files"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"manifest: torn or damaged ({type(error).__name__}: {error})") from error
    if claimed != _digest(body) or _text(body) != raw:
        raise CorruptCheckpointError("manifest: its own digest does not match")
    return manifest


def _check_types(body: Mapping[str, Any]) -> None:
    """Raise TypeError for values that ``render`` never writes, whatever the digest says."""
    counts = [body["step"], body["attempt"], body["world_size"], *body["ranks"]]
    counts += [record["bytes"] for record in body["files"].values()]
    if any(type(count) is not int or not 0 <= count < _MOST for count in counts):
        raise TypeError("a count is invalid")
    if not isinstance(body["job_id"], str) or type(body["created_at"]) not in (int, float):
        raise TypeError("job_id or created_at is malformed")
    if not math.isfinite(body["created_at"]):
        raise ValueError("created_at is not a time")
    if any(type(value) not in (int, float, str) for value in body["metrics"].values()):
        raise TypeError("a metric is not a number")
    if any(not isinstance(record["sha256"], str) for record in body["files"].values()):
        raise TypeError("a digest is invalid")


def render_files(files: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    """Return file records as JSON values."""
    return {name: {"bytes": record.bytes, "sha256": record.sha256} for name, record in sorted(files.items())}


def parse_files(body: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Parse what ``render_files`` wrote."""
    return {name: FileRecord(bytes=value["bytes"], sha256=value["sha256"]) for name, value in body.items()}


def _text(body: Mapping[str, Any]) -> bytes:
    return (json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n").encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
