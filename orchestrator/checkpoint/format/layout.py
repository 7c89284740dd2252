"""Names of files and directories of a checkpoint directory (docs/checkpoints.md), and its manifest; no other module defines them. Pure.

The manifest is written last. It holds size and SHA-256 of every other file, and a digest of its own body. Its text is canonical: a file that
differs in any byte from what would be written is damaged.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from orchestrator.checkpoint.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST = "manifest.json"
FENCE = "fence.json"
LOCK = ".lock"
QUARANTINE_NOTE = "quarantine.json"
SMALL_BYTES = 16 * 1024 * 1024  # limit for a file that describes others: a rank could write any size
STATE = "state"
_STAGING = ".staging-"
_REMOVING = ".removing-"
_NAME = re.compile(r"step-(\d{12,})-a(\d+)")
_BROKEN = re.compile(r"(step-\d{12,}-a\d+)\.broken(?:-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """The attempt and step of a checkpoint. Ordered by attempt first: a newer attempt takes precedence."""

    attempt: int
    step: int

    @property
    def name(self) -> str:
        """The directory's name."""
        return f"step-{self.step:012d}-a{self.attempt}"


def parse_name(name: str) -> Version | None:
    """Return the version in a committed checkpoint's directory name, None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else Version(step=int(match[1]), attempt=int(match[2]))


def parse_broken(name: str) -> Version | None:
    """Return the version in a quarantined checkpoint's directory name."""
    match = _BROKEN.fullmatch(name)
    return None if match is None else parse_name(match[1])


def broken_name(name: str, number: int) -> str:
    """Return the name for a quarantined checkpoint; ``number``, from 1, makes names unique."""
    return f"{name}.broken" if number == 1 else f"{name}.broken-{number}"


def staging_name(version: Version, token: str) -> str:
    """Return the name of the directory in which the ranks of one run (``token``) write a checkpoint."""
    return f"{_STAGING}{version.name}-{token}"


def parse_staging(name: str) -> tuple[Version, str] | None:
    """Return version and run token of a staging directory's name."""
    if not name.startswith(_STAGING):
        return None
    base, _, token = name.removeprefix(_STAGING).rpartition("-")
    version = parse_name(base)
    return None if version is None else (version, token)


def removing_name(name: str) -> str:
    """Return a directory's name while its files are deleted, so that it does not count as damaged."""
    return f"{_REMOVING}{name}"


def is_removing(name: str) -> bool:
    """Whether deletion of this directory has begun."""
    return name.startswith(_REMOVING)


def removed_name(name: str) -> str:
    """Return the name from which ``removing_name`` made this one."""
    return name.removeprefix(_REMOVING)


def ticket_name(attempt: int, token: str, number: int) -> str:
    """Return the name of the note in which the ranks of a run agree on the result of their ``number``-th load()."""
    return f"{ticket_prefix(attempt, token)}{number}.json"


def ticket_prefix(attempt: int, token: str) -> str:
    """Return the prefix of all such notes of one run."""
    return f".resume-a{attempt}-{token}-"


def is_ticket(name: str) -> bool:
    """Whether this file is such a note."""
    return name.startswith(".resume-a")


def rank_part(rank: int) -> str:
    """Return the base name of a rank's own files."""
    return f"rank-{rank:05d}"


def shard_part(rank: int) -> str:
    """Return the base name of the files with a rank's pieces of the sharded tensors."""
    return f"shard-{rank:05d}"


def done_marker(rank: int) -> str:
    """Return the name of the file that each rank writes last: its files and their digests."""
    return f"{rank_part(rank)}.done.json"


def is_done_marker(name: str) -> bool:
    """Whether a file in a staging directory marks a rank as finished."""
    return name.endswith(".done.json")


def tree_file(part: str) -> str:
    """Return the JSON file of a part (``state`` or a rank's)."""
    return f"{part}.json"


def tensor_file(part: str) -> str:
    """Return the safetensors file of a part; absent when it holds no tensor."""
    return f"{part}.safetensors"


FORMAT = "orch-checkpoint"
FORMAT_VERSION = 1

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Time = Annotated[float, Meta(ge=0.0, le=1e11)]
"""Seconds since the epoch, and no infinity."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file's size in bytes and its SHA-256 in hexadecimal."""

    bytes: Count
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A complete checkpoint. ``ranks`` lists the ranks with a part of their own; ``created_at`` is a wall time."""

    step: Count
    attempt: Count
    job_id: str
    world_size: Count
    created_at: Time
    ranks: tuple[Count, ...]
    metrics: dict[str, float] = {}
    files: dict[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())


def render_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as canonical JSON text."""
    body = msgspec.to_builtins(manifest)
    body["metrics"] = {name: value if math.isfinite(value) else repr(value) for name, value in manifest.metrics.items()}
    body["files"] = render_files(manifest.files)
    return _text({"format": FORMAT, "version": FORMAT_VERSION, **body})


def parse_manifest(raw: bytes | bytearray | memoryview) -> Manifest:
    """Parse what ``render_manifest`` wrote. Raises CorruptCheckpointError for anything else."""
    try:
        body = json.loads(bytes(raw))
        claimed = body.pop("sha256")
        fields = dict(body)
        if (fields.pop("format"), repr(fields.pop("version"))) != (FORMAT, repr(FORMAT_VERSION)):
            raise CorruptCheckpointError(
                f"manifest: not {FORMAT} version {FORMAT_VERSION}; read it with the orch that wrote it"
            )
        metrics = msgspec.convert(fields["metrics"], dict[str, float | str])
        fields["metrics"] = {name: float(value) for name, value in metrics.items()}
        manifest = msgspec.convert(fields, Manifest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"manifest: torn or damaged ({type(error).__name__}: {error})") from error
    if claimed != _digest(body) or _text(body) != raw:
        raise CorruptCheckpointError("manifest: its own digest does not match")
    return manifest


def render_files(files: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    """Return file records as JSON values."""
    return {name: msgspec.to_builtins(record) for name, record in sorted(files.items())}


def parse_files(body: Any) -> dict[str, FileRecord]:
    """Parse what ``render_files`` wrote. Raises ValueError for anything else."""
    return msgspec.convert(body, dict[str, FileRecord])


def _text(body: Mapping[str, Any]) -> bytes:
    return (json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n").encode()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
