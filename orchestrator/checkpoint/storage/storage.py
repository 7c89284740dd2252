# ruff: noqa: D102 - Storage documents the methods of LocalStorage
"""Storage of checkpoint files: a port with few operations, and its implementation on a local or shared file system.

Paths are relative to the storage's root and separated by "/". Code above this port does not depend on disks,
and tests inject faults between the two. ``pin`` keeps a checkpoint of another job for a job that starts from it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from orchestrator import trees
from orchestrator.abandoned import sha256_of, stop_if_abandoned
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import SMALL_BYTES, FileRecord
from orchestrator.durable_files import sync_directory, sync_tree
from orchestrator.spec.plain_files import open_plain, refuse_larger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

LOCK_TIMEOUT_SECONDS = 5.0  # a stopped process may hold the lock for ever; the order of attempts still protects
_LOCK_POLL_SECONDS = 0.01
DRAFT_PREFIX = ".draft-"
_CHUNK = 4 * 1024 * 1024
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk: saves fail, and nothing else may."""


class Storage(Protocol):
    """Durable files. Every method raises OSError when the storage fails.

    ``atomic_create``: of several simultaneous calls of ``create`` for the same file, exactly one succeeds.
    """

    atomic_create: bool

    def write(self, path: str, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> FileRecord:
        """Create or replace a file; on return it survives a power cut unless ``durable`` is false."""
        ...

    def create(self, path: str, content: bytes) -> bool:
        """Create a file atomically; False, and nothing changed, when it exists."""
        ...

    def replace(self, path: str, content: bytes, *, durable: bool = False) -> None:
        """Create or replace a small file of the root atomically; on return it survives a power cut if ``durable``."""
        ...

    def read(self, path: str, most_bytes: int = SMALL_BYTES) -> memoryview:
        """Return the whole content, writable. Raises NotPlainFileError, without reading, above ``most_bytes``."""
        ...

    def digest(self, path: str) -> FileRecord:
        """Return size and SHA-256, in bounded memory."""
        ...

    def names(self, path: str = "") -> list[str]:
        """Return the entries of a directory, sorted; empty when it does not exist."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a directory atomically and durably; FileExistsError when the target exists."""
        ...

    def sync(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def remove(self, path: str) -> None:
        """Delete a file or a tree; a missing one is no error."""
        ...

    def discard(self, path: str) -> None:
        """Delete a checkpoint so that a half deleted one never counts as damaged."""
        ...

    def free_bytes(self) -> int | None:
        """Return the free space in bytes, None if unknown."""
        ...

    def lock(self) -> contextlib.AbstractContextManager[bool]:
        """Exclude other processes; yields False after a timeout."""
        ...

    def location(self, path: str = "") -> str:
        """Return the full path or URL, for users."""
        ...


@contextlib.contextmanager
def except_on_full_disk() -> Iterator[None]:
    """Leave out what a full disk has no space for: only saves need it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def open_storage(root: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> Storage:
    """Open the storage behind a path or a URL (``s3://bucket/path``). Raises CheckpointError for an unsupported one.

    ``environ`` holds credentials and endpoints that take precedence over this process's environment.
    """
    text = os.fspath(root)
    if "://" not in text:
        return LocalStorage(text)
    if text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    from orchestrator.checkpoint.storage.object_storage import ObjectStorage

    return ObjectStorage(text, environ)


class LocalStorage:
    """A directory on a file system that every rank sees."""

    atomic_create = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        private: bool = False,
    ) -> None:
        """``private``: files created here are readable by this user only, whatever the umask."""
        self.root = Path(root).absolute()
        self._file_mode, self._folder_mode = (0o600, 0o700) if private else (0o644, 0o777)
        self._lock_timeout_seconds = lock_timeout_seconds

    def write(self, path: str, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> FileRecord:
        target = self.root / path
        handle = self._open_for_writing(target)
        try:
            digest, size = hashlib.sha256(), 0
            for chunk in chunks:
                view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
                for start in range(0, len(view), _CHUNK):  # hash and write while the piece is in the cache
                    piece = view[start : start + _CHUNK]
                    digest.update(piece)
                    _write_all(handle, piece)
                size += len(view)
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        return FileRecord(bytes=size, sha256=digest.hexdigest())

    def create(self, path: str, content: bytes) -> bool:
        with self._draft(content, durable=False) as draft:
            try:
                os.link(draft, self.root / path)
            except FileExistsError:
                return False
        return True

    def replace(self, path: str, content: bytes, *, durable: bool = False) -> None:
        with self._draft(content, durable=durable) as draft:
            draft.replace(self.root / path)
            if durable:
                sync_directory((self.root / path).parent)

    @contextlib.contextmanager
    def _draft(self, content: bytes, *, durable: bool) -> Iterator[Path]:
        """Yield the path of a small file with ``content``, removed at the end."""
        draft = f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
        try:
            self.write(draft, [content], durable=durable)
            yield self.root / draft
        finally:
            (self.root / draft).unlink(missing_ok=True)

    def read(self, path: str, most_bytes: int = SMALL_BYTES) -> memoryview:
        with self._opened(path) as file:  # directly into the result's memory
            size, at = os.fstat(file.fileno()).st_size, 0
            refuse_larger(size, most_bytes, self.location(path))
            content = memoryview(bytearray(size))
            while at < len(content):
                count = file.readinto(content[at:])
                if not count:
                    break
                at += count
                stop_if_abandoned()
        return content[:at]

    def digest(self, path: str) -> FileRecord:
        with self._opened(path) as file:
            digest, size = sha256_of(file)
            return FileRecord(bytes=size, sha256=digest)

    def _opened(self, path: str) -> FileIO:
        """Open a file unbuffered. A FIFO or a device in its place is an error: a read would block for ever."""
        return FileIO(open_plain(self.root / path, follow=True))

    def names(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def rename(self, source: str, target: str) -> None:
        try:
            os.rename(self.root / source, self.root / target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "exists already", str(self.root / target)) from error
            raise
        self.sync("")

    def sync(self, path: str) -> None:
        sync_directory(self.root / path)

    def remove(self, path: str) -> None:
        target = self.root / path
        trees.remove(target).left.refuse(target)

    def discard(self, path: str) -> None:
        doomed = layout.removing_name(path)
        self.remove(doomed)
        # Not fsynced: after a power cut the checkpoint exists again, complete, until the next retention.
        os.rename(self.root / path, self.root / doomed)
        self.remove(doomed)

    def free_bytes(self) -> int | None:
        place = self.root
        while not place.exists():
            place = place.parent
        facts = os.statvfs(place)
        return facts.f_bavail * facts.f_frsize

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold an flock, which the kernel frees when its holder dies."""
        handle = os.open(self._made(self.root) / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, self._file_mode)
        try:
            yield self._locked(handle)
        finally:
            os.close(handle)

    def location(self, path: str = "") -> str:
        return str(self.root / path) if path else str(self.root)

    def _locked(self, handle: int) -> bool:
        deadline = time.monotonic() + self._lock_timeout_seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_LOCK_POLL_SECONDS)
            except OSError:  # a file system without locks
                return False
            else:
                return True

    def _open_for_writing(self, target: Path) -> int:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(target, flags, self._file_mode)
        except FileNotFoundError:
            self._made(target.parent)
            return os.open(target, flags, self._file_mode)

    def _made(self, folder: Path) -> Path:
        """Return the folder, created if missing; a new root survives a power cut."""
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True, mode=self._folder_mode)
        for place in missing:
            if self.root.is_relative_to(place):
                sync_directory(place.parent)
        return folder


def _write_all(handle: int, view: memoryview) -> None:
    while view:
        view = view[os.write(handle, view) :]


_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})


def pin(path: str, folder: str | os.PathLike[str]) -> str:
    """Keep the checkpoint at ``path`` under ``folder``; return its new path.

    A checkpoint behind a URL, or on a file system that cannot be linked from ``folder``, stays where it is: its own job
    must keep it. Files that a job's script wrote itself may be rewritten in place, and are copied. Raises OSError when
    it is gone, or the copy fails.
    """
    if "://" in path:
        return path
    source, target = Path(path), Path(folder) / Path(path).name
    is_ours = source.is_dir() and layout.parse_name(source.name) is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.is_dir():
            problems = trees.Problems()
            trees.copy(source, target, problems, link=is_ours)
            problems.refuse(source)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
        sync_tree(target)
    except OSError as error:
        trees.remove(target)
        if not is_ours or error.errno not in _NO_LINK:
            raise
        with contextlib.suppress(OSError):
            target.parent.rmdir()
        return path
    return str(target)
