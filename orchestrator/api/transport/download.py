"""Downloads files of a job into a directory: resumes interrupted downloads, and keeps only files with the daemon's digest.

Names are untrusted: no name can lead out of the directory, by its text or by a link in the directory.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from orchestrator.api.errors import BadRequestError, ProtocolMismatchError, RefusedError
from orchestrator.private_files import enter_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orchestrator.api.files import FileDigest, FileView

_PIECE_BYTES: Final = 1024 * 1024
_PART: Final = ".orch-part"
_TRIES: Final = 2


class Fetched(NamedTuple):
    """A downloaded file; ``received`` is the number of transferred bytes, 0 for a file that already existed."""

    path: str
    size_bytes: int
    received: int


class FileSource(Protocol):
    """The client's requests about a job's files."""

    def file_digest(self, ref: str, path: str) -> FileDigest:
        """Return the size and SHA-256 of one file."""
        ...

    def file_content(self, ref: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Yield the bytes of one file, from ``offset`` on. Raises ConnectionLostError if they end early."""
        ...


class Downloader:
    """Downloads into ``target``; ``progress`` is called with each piece's size."""

    def __init__(self, client: FileSource, job_id: str, target: Path, progress: Callable[[int], None]) -> None:
        self._client, self._job_id, self._target = client, job_id, target
        self._progress = progress

    def fetch(self, file: FileView) -> Fetched:
        """Download the whole file. Raises the daemon's errors, RefusedError for content that keeps changing."""
        folder, name = _checked(file.path)
        try:
            parent = enter_below(self._target, folder, make=True)
        except (OSError, ValueError) as error:
            raise BadRequestError(
                f"{self._target}/{file.path} cannot be written: {error}", hint="name another --output-dir"
            ) from error
        try:
            return self._fetch(file, parent, name)
        except OSError as error:
            raise BadRequestError(
                f"{self._target}/{file.path} cannot be written: {error.strerror or error}",
                hint="name another --output-dir",
            ) from error
        finally:
            os.close(parent)

    def _fetch(self, file: FileView, parent: int, name: str) -> Fetched:
        part = f".{name}{_PART}"
        received = 0
        for attempt in range(_TRIES):
            digest = self._client.file_digest(self._job_id, file.path)
            if _digest_of(parent, name) == (digest.size_bytes, digest.sha256):
                self._progress(digest.size_bytes)
                return Fetched(file.path, digest.size_bytes, 0)
            received += self._append(file.path, parent, part, afresh=attempt > 0)
            if _digest_of(parent, part) == (digest.size_bytes, digest.sha256):
                os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
                return Fetched(file.path, digest.size_bytes, received)
        with suppress(FileNotFoundError):
            os.unlink(part, dir_fd=parent)
        raise RefusedError(
            f"{file.path} is not what the daemon has: it changes while it is read",
            hint="try again when the job has ended",
        )

    def _append(self, path: str, parent: int, part: str, *, afresh: bool) -> int:
        """Append the missing bytes of the file to its part; return how many were received."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_TRUNC if afresh else 0)
        received = 0
        with os.fdopen(os.open(part, flags, 0o600, dir_fd=parent), "wb") as out:
            offset = os.fstat(out.fileno()).st_size
            self._progress(offset)
            out.seek(offset)
            for piece in self._client.file_content(self._job_id, path, offset):
                out.write(piece)
                received += len(piece)
                self._progress(len(piece))
        return received


def _checked(path: str) -> tuple[str, str]:
    parts = path.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in path or len(parts) < 2:
        raise ProtocolMismatchError(f"the daemon names a file {path!r}, which leads nowhere; nothing was written")
    return "/".join(parts[:-1]), parts[-1]


def _digest_of(parent: int, name: str) -> tuple[int, str] | None:
    """Return size and SHA-256 of a regular file; None for anything else."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return None
    sha256, size = hashlib.sha256(), 0
    with os.fdopen(handle, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
            size += len(piece)
    return size, sha256.hexdigest()
