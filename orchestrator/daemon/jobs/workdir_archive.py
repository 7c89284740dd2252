"""Archives the working directory at submission: stored by content, laid out as a writable copy per job.

An archive is a manifest (JSON, itself a blob) of paths, modes and digests. Files excluded by ``.gitignore`` or
``.orchignore`` and ``.git`` are left out. Links that lead out of the directory are refused, as is more than the limit.
Blobs are durable before the archive's digest is returned.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.abandoned import sha256_of, stop_if_abandoned
from orchestrator.durable_files import whole_file, write_whole
from orchestrator.runtime.nodes.files import lay_out
from orchestrator.runtime.nodes.workdir_walk import (
    MAX_COUNTED,
    Found,
    LeftOutCount,
    WorkdirError,
    link_target,
    refuse_too_large,
    walk,
)
from orchestrator.spec.plain_files import open_plain, read_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.core.events import LeftOut

__all__ = ["Snapshot", "WorkdirError", "lay_out", "measure", "take"]

_CHUNK: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An archive: the manifest's digest, the number of files, their size in bytes."""

    digest: str
    files: int
    size_bytes: int
    left_out: LeftOut | None = None


def take(directory: Path, blob: Callable[[str], Path], *, max_bytes: int, max_counted: int = MAX_COUNTED) -> Snapshot:
    """Archive ``directory``. ``blob`` returns a digest's file. Raises WorkdirError.

    At most ``max_counted`` excluded files are counted.
    """
    if not directory.is_dir():
        raise WorkdirError(f"working_dir {directory} is not a directory; set working_dir to one, or to null for none")
    left_out = LeftOutCount(most=max_counted)
    found = list(walk(directory, left_out))
    size = refuse_too_large(directory, found, max_bytes)
    entries = [_entry(f, directory, blob) for f in found]
    manifest = json.dumps({"version": 1, "entries": entries}, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    _store(manifest, blob(digest))
    return Snapshot(digest=digest, files=len(entries), size_bytes=size, left_out=left_out.counts())


def measure(directory: Path) -> tuple[int, int, LeftOut | None]:
    """Return the files and bytes that an archive would hold, and what it would exclude. Raises WorkdirError."""
    left_out = LeftOutCount()
    found = list(walk(directory, left_out))
    size = sum(f.status.st_size for f in found if stat.S_ISREG(f.status.st_mode))
    return len(found), size, left_out.counts()


def _entry(found: Found, root: Path, blob: Callable[[str], Path]) -> dict[str, object]:
    stop_if_abandoned()
    mode = found.status.st_mode
    if stat.S_ISDIR(mode):
        return {"path": found.relative, "type": "directory"}
    if stat.S_ISLNK(mode):
        return {"path": found.relative, "type": "link", "target": link_target(found, root)}
    if not stat.S_ISREG(mode):
        raise WorkdirError(f"{found.path} is neither a file, a directory nor a link; list it in .gitignore")
    return {
        "path": found.relative,
        "type": "file",
        "mode": 0o700 if mode & 0o100 else 0o600,
        "digest": _store_file(found, blob),
    }


def _store_file(found: Found, blob: Callable[[str], Path]) -> str:
    small = found.status.st_size <= _CHUNK
    try:
        data = read_plain(found.path, _CHUNK) if small else b""
        digest = hashlib.sha256(data).hexdigest() if small else _digest(found.path)
    except OSError as error:
        raise WorkdirError(f"{found.path}: {error.strerror}; make it readable or list it in .gitignore") from error
    if small:
        _store(data, blob(digest))
    else:
        _store_large(found.path, digest, blob(digest))
    return digest


def _digest(path: Path) -> str:
    with os.fdopen(open_plain(path), "rb") as file:
        return sha256_of(file)[0]


def _store_large(path: Path, digest: str, target: Path) -> None:
    if target.exists():
        return
    hashing = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as sink, os.fdopen(open_plain(path), "rb") as source:
        while chunk := source.read(_CHUNK):
            hashing.update(chunk)
            sink.write(chunk)
        if hashing.hexdigest() != digest:
            raise WorkdirError(
                f"{path} changes while it is read; submit again when it is at rest, or list it in .gitignore"
            )


def _store(data: bytes, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, data)
