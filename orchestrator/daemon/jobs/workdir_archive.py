"""Archives the working directory at submission: stored by content, laid out as a writable copy per job.

An archive is a manifest (JSON, itself a blob) of paths, modes and digests. Files excluded by ``.gitignore`` or
``.orchignore`` and ``.git`` are left out. Links that lead out of the directory are refused, as is more than the limit.
Blobs are durable before the archive's digest is returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from orchestrator.core.events import LeftOut
from orchestrator.runtime.nodes.ignore_rules import ALWAYS_IGNORED, IgnoreFileError, ignored_by, rules_of
from orchestrator.runtime.nodes.working_copy import lay_out
from orchestrator.spec.plain_files import open_plain, read_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.runtime.nodes.ignore_rules import IgnoreRules

__all__ = ["Snapshot", "SnapshotError", "lay_out", "measure", "take"]

MAX_FILES: Final = 50_000
MAX_COUNTED: Final = 2000
NAMED_LEFT_OUT: Final = 3
_CHUNK: Final = 1024 * 1024


class SnapshotError(Exception):
    """The working directory cannot be archived; the message gives the obstacle and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An archive: the manifest's digest, the number of files, their size in bytes."""

    digest: str
    files: int
    size_bytes: int
    left_out: LeftOut | None = None


@dataclass(slots=True)
class _LeftOutCount:
    """Counts what ignore files exclude, up to ``most`` files: a directory of data may hold millions."""

    most: int = MAX_COUNTED
    files: int = 0
    size_bytes: int = 0
    by: set[str] = field(default_factory=set)
    largest: list[tuple[int, str]] = field(default_factory=list)
    more: bool = False

    def add(self, entry: os.DirEntry[str], relative: str, by: str) -> None:
        """Count a file, or the content of a directory."""
        stack = [(entry, relative)]
        while stack:
            entry, relative = stack.pop()
            if self.files >= self.most:
                self.more = True
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inside:
                        stack += [(e, f"{relative}/{e.name}") for e in islice(inside, self.most + 1)]
                    continue
                size = entry.stat(follow_symlinks=False).st_size
            except OSError:
                continue  # it would be excluded anyway
            self.files += 1
            self.size_bytes += size
            self.by.add(by)
            self.largest = sorted([*self.largest, (-size, relative)])[:NAMED_LEFT_OUT]

    def told(self) -> LeftOut | None:
        """Return the counts; None where nothing was excluded."""
        if not self.files:
            return None
        names = tuple(name for _, name in self.largest)
        return LeftOut(
            files=self.files, size_bytes=self.size_bytes, by=tuple(sorted(self.by)), largest=names, more=self.more
        )


@dataclass(frozen=True, slots=True)
class _Found:
    relative: str
    path: Path
    status: os.stat_result


def take(directory: Path, blob: Callable[[str], Path], *, max_bytes: int, max_counted: int = MAX_COUNTED) -> Snapshot:
    """Archive ``directory``. ``blob`` gives a digest's file. Raises SnapshotError.

    At most ``max_counted`` excluded files are counted.
    """
    if not directory.is_dir():
        raise SnapshotError(f"working_dir {directory} is not a directory; set working_dir to one, or to null for none")
    left_out = _LeftOutCount(most=max_counted)
    found = list(_walk(directory, left_out))
    size = sum(f.status.st_size for f in found if stat.S_ISREG(f.status.st_mode))
    if size > max_bytes:
        largest = sorted(found, key=lambda f: -f.status.st_size)[:3]
        names = ", ".join(f"{f.relative} ({f.status.st_size / 1e6:.0f} MB)" for f in largest)
        raise SnapshotError(
            f"working_dir {directory} holds {size / 1e6:.0f} MB, the limit is {max_bytes / 1e6:.0f} MB; list data in"
            f" .gitignore and read it from its own place. Largest: {names}"
        )
    entries = [_entry(f, directory, blob) for f in found]
    manifest = json.dumps({"version": 1, "entries": entries}, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    _store(manifest, blob(digest))
    return Snapshot(digest=digest, files=len(entries), size_bytes=size, left_out=left_out.told())


def measure(directory: Path) -> tuple[int, int, LeftOut | None]:
    """Return files and bytes that an archive would hold, and what it would not. Raises SnapshotError."""
    left_out = _LeftOutCount()
    found = list(_walk(directory, left_out))
    size = sum(f.status.st_size for f in found if stat.S_ISREG(f.status.st_mode))
    return len(found), size, left_out.told()


def _walk(root: Path, left_out: _LeftOutCount) -> Iterator[_Found]:
    count = 0
    stack: list[tuple[Path, str, tuple[IgnoreRules, ...]]] = [(root, "", ())]
    while stack:
        directory, prefix, rules = stack.pop()
        try:
            rules = (*rules, *rules_of(directory, prefix))
        except IgnoreFileError as error:
            raise SnapshotError(str(error)) from error
        try:
            entries = sorted(os.scandir(directory), key=lambda e: e.name)
        except OSError as error:
            raise SnapshotError(f"{directory}: {error.strerror}; make it readable or list it in .gitignore") from error
        empty = True
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            is_dir = entry.is_dir(follow_symlinks=False)
            if entry.name in ALWAYS_IGNORED:
                continue
            if by := ignored_by(rules, relative, is_dir=is_dir):
                left_out.add(entry, relative, by)
                continue
            empty = False
            count += 1
            if count > MAX_FILES:
                raise SnapshotError(f"{root} holds more than {MAX_FILES} files; list what is not code in .gitignore")
            if is_dir:
                stack.append((Path(entry.path), f"{relative}/", rules))
                continue
            yield _Found(relative, Path(entry.path), entry.stat(follow_symlinks=False))
        if empty and prefix:
            yield _Found(prefix.rstrip("/"), directory, directory.stat())


def _entry(found: _Found, root: Path, blob: Callable[[str], Path]) -> dict[str, object]:
    mode = found.status.st_mode
    if stat.S_ISDIR(mode):
        return {"path": found.relative, "type": "directory"}
    if stat.S_ISLNK(mode):
        target = str(found.path.readlink())
        resolved = Path(os.path.realpath(found.path))
        if os.path.isabs(target) or not resolved.is_relative_to(Path(os.path.realpath(root))):  # noqa: PTH117 - the link's own text
            raise SnapshotError(
                f"{found.path} links to {target}, outside of working_dir; put the file itself there, or list the link"
                " in .gitignore"
            )
        return {"path": found.relative, "type": "link", "target": target}
    if not stat.S_ISREG(mode):
        raise SnapshotError(f"{found.path} is neither a file, a directory nor a link; list it in .gitignore")
    return {
        "path": found.relative,
        "type": "file",
        "mode": 0o700 if mode & 0o100 else 0o600,
        "digest": _store_file(found, blob),
    }


def _store_file(found: _Found, blob: Callable[[str], Path]) -> str:
    small = found.status.st_size <= _CHUNK
    try:
        data = read_plain(found.path, _CHUNK) if small else b""
        digest = hashlib.sha256(data).hexdigest() if small else _digest(found.path)
    except OSError as error:
        raise SnapshotError(f"{found.path}: {error.strerror}; make it readable or list it in .gitignore") from error
    if small:
        _store(data, blob(digest))
    else:
        _store_large(found.path, digest, blob(digest))
    return digest


def _digest(path: Path) -> str:
    with os.fdopen(open_plain(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _store_large(path: Path, digest: str, target: Path) -> None:
    if target.exists():
        return
    hashing = hashlib.sha256()
    with _draft(target) as sink, os.fdopen(open_plain(path), "rb") as source:
        while chunk := source.read(_CHUNK):
            hashing.update(chunk)
            sink.write(chunk)
        if hashing.hexdigest() != digest:
            raise SnapshotError(
                f"{path} changes while it is read; submit again when it is at rest, or list it in .gitignore"
            )


def _store(data: bytes, target: Path) -> None:
    if not target.exists():
        with _draft(target) as sink:
            sink.write(data)


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[BinaryIO]:
    """A new file, which becomes ``target`` when it is durable. Other processes may store the same content meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as sink:
            yield sink
            sink.flush()
            _sync(sink.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def _sync(handle: int) -> None:
    os.fsync(handle)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
