"""A job's files on a node that does not share the daemon's home: working copy, logs, exit records, outputs.

Plain blocking calls on one directory, without Ray; the node's agent makes them for the daemon. Decides nothing about
what is fetched or when. Every call is idempotent: existing files are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.durable_files import sync_directory, sync_tree
from orchestrator.private_files import enter_below
from orchestrator.runtime.nodes.directories import ROUND_SECONDS
from orchestrator.runtime.nodes.working_copy import Outputs, find_outputs, lay_out, open_output
from orchestrator.runtime.spawn.lifeline import MAX_RECORD_BYTES
from orchestrator.spec.paths import Paths
from orchestrator.spec.plain_files import NotPlainFileError, open_plain, read_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

CHUNK_BYTES: Final = 4 * 1024 * 1024
CACHE_BYTES: Final = 2 * 1024**3
YOUNG_SECONDS: Final = 60.0  # a younger file may belong to a job that started after the caller listed the live ones
_LOG = re.compile(r"attempt-(\d+)/rank-(\d+)\.log(?:\.(\d+))?$")
_EXIT = re.compile(r"attempt-(\d+)/rank-(\d+)\.json$")


class BlobDamagedError(Exception):
    """The received blob differs from the one sent; nothing was kept. Send it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLocation:
    """Position up to which a rank's log was read: the file, by its inode (rotation changes its name), and bytes."""

    inode: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """Whole lines of a rank's log, and the position after them."""

    attempt: int
    rank: int
    place: LogLocation
    data: bytes


class NodeFiles:
    """Reads and writes the files of jobs below ``home``, a directory of this node with the layout of the daemon's own.

    Files are read in chunks of ``chunk_bytes``; blobs are kept up to ``cache_bytes`` in all. No directory that a job has
    replaced by a link is followed.
    """

    def __init__(self, home: Path, *, chunk_bytes: int = CHUNK_BYTES, cache_bytes: int = CACHE_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._cache_bytes = cache_bytes
        self.paths = Paths(home=home.resolve(), socket=home / "none")

    def missing_blobs(self, job_id: str, wanted: Sequence[str]) -> list[str]:
        """Return the archive's blobs that must be sent; none when the job's working copy exists."""
        if self.paths.work(job_id).exists():
            return []
        return [digest for digest in wanted if not self.paths.blob(digest).exists()]

    def put_blob(self, digest: str, offset: int, data: bytes, *, last: bool) -> None:
        """Store a piece of a blob, in order; the last one completes it. Raises BlobDamagedError."""
        target = self.paths.blob(digest)
        draft = target.with_name(f".{digest}.sent")
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)
            file.truncate()
        if not last:
            return
        with draft.open("rb") as file:
            arrived = hashlib.file_digest(file, "sha256").hexdigest()
        if arrived != digest:
            draft.unlink()
            raise BlobDamagedError(f"blob {digest[:12]} arrived as {arrived[:12]}; it is sent again")
        sync_tree(draft)
        draft.replace(target)
        sync_directory(target.parent)

    def lay_out(self, job_id: str, digest: str) -> str:
        """Create the job's working copy from stored blobs, or an empty one without a digest. Returns its path."""
        work = self.paths.work(job_id)
        if digest:
            lay_out(digest, self.paths.blob, work)
        else:
            work.mkdir(parents=True, exist_ok=True)
        return str(work)

    def read_logs(self, job_id: str, places: Mapping[tuple[int, int], LogLocation]) -> list[LogPart]:
        """Return what every rank has logged here since ``places``; at most a chunk per rank."""
        files: dict[tuple[int, int], list[tuple[int, Path]]] = {}
        for path in self.paths.logs(job_id).glob("attempt-*/rank-*.log*"):
            if match := _LOG.search(path.as_posix()):
                files.setdefault((int(match[1]), int(match[2])), []).append((-int(match[3] or 0), path))
        parts = [
            self._read_log(key, [path for _, path in sorted(found)], places.get(key, LogLocation()))
            for key, found in sorted(files.items())
        ]
        return [part for part in parts if part is not None]

    def _read_log(self, key: tuple[int, int], files: Sequence[Path], place: LogLocation) -> LogPart | None:
        opened = []
        for path in files:
            try:
                opened.append(os.fdopen(open_plain(path, real=True), "rb"))
            except (FileNotFoundError, NotPlainFileError):  # just rotated, found at the next call; or no log
                for file in opened:
                    file.close()
                return None
        try:
            inodes = [os.fstat(file.fileno()).st_ino for file in opened]
            first = inodes.index(place.inode) if place.inode in inodes else 0
            offset = place.offset if place.inode in inodes else 0
            for file, inode in list(zip(opened, inodes, strict=True))[first:]:
                file.seek(offset)
                data = file.read(self._chunk_bytes)
                data = data[: data.rfind(b"\n") + 1]
                if data:
                    next_place = LogLocation(inode=inode, offset=offset + len(data))
                    return LogPart(attempt=key[0], rank=key[1], place=next_place, data=data)
                offset = 0
        finally:
            for file in opened:
                file.close()
        return None

    def exit_records(self, job_id: str) -> dict[tuple[int, int], bytes]:
        """Return every exit record of the job here, by attempt and rank."""
        found = {}
        for path in self.paths.exits(job_id).glob("attempt-*/rank-*.json"):
            if match := _EXIT.search(path.as_posix()):
                with contextlib.suppress(OSError):  # an invalid record counts as absent
                    found[int(match[1]), int(match[2])] = read_plain(path, MAX_RECORD_BYTES, real=True)
        return found

    def find_outputs(self, job_id: str, patterns: Sequence[str], max_bytes: int) -> Outputs:
        """Call ``working_copy.find_outputs`` for the job's working copy."""
        return find_outputs(self.paths.work(job_id), patterns, max_bytes)

    def read_output(self, job_id: str, relative: str, offset: int) -> bytes:
        """Return a chunk of a file that ``find_outputs`` named; empty at its end.

        Raises OSError for a link in its place, or for a path outside of the working copy.
        """
        parent, name = os.path.split(relative)
        try:
            folder = enter_below(self.paths.work(job_id), parent)
        except ValueError as error:
            raise PermissionError(str(error)) from error
        try:
            handle = open_output(folder, name)
            try:
                return os.pread(handle, self._chunk_bytes, offset)
            finally:
                os.close(handle)
        finally:
            os.close(folder)

    def keep_only(self, live: Collection[str], *, young_seconds: float = YOUNG_SECONDS) -> list[str]:
        """Remove the files of jobs that are not ``live``, and the least recently used blobs beyond the cache's size.

        Return the jobs of which all files were removed.
        """
        removed = []
        now, until = time.time(), time.monotonic() + ROUND_SECONDS
        for status, path in _there(self.paths.jobs.glob("*")):
            old = path.name not in live and now - status.st_ctime > young_seconds
            if old and not trees.remove(path, until=until).left:  # what stays is tried again
                removed.append(path.name)
        blobs = list(_there(self.paths.blobs.glob("sha256/*/*")))
        size = sum(status.st_size for status, _ in blobs)
        for status, path in sorted(blobs, key=lambda each: each[0].st_atime):
            if size <= self._cache_bytes:
                break
            if now - status.st_ctime > young_seconds:
                path.unlink(missing_ok=True)
                size -= status.st_size
        return removed


def _there(paths: Iterable[Path]) -> Iterator[tuple[os.stat_result, Path]]:
    """Yield each path that still exists, with its status: a draft may have been renamed since it was listed."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield path.stat(), path
