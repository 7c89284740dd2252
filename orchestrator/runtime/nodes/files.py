"""A job's files on a node: its working copy, created from an archive's blobs and searched for outputs; logs and exit records for the daemon.

Plain blocking calls, without Ray. ``NodeFiles`` has those of a node that does not share the daemon's home, whose agent makes them for the
daemon; the others are also used by the daemon for its own node. Decides nothing about what is fetched or when. Every call is idempotent:
existing files are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final

from orchestrator import trees
from orchestrator.abandoned import stop_if_abandoned
from orchestrator.durable_files import boot_id, sync_directory, sync_tree, write_whole
from orchestrator.private_files import enter_below
from orchestrator.runtime.nodes.directories import ROUND_SECONDS
from orchestrator.runtime.remote import called
from orchestrator.runtime.spawn.client import MAX_RECORD_BYTES
from orchestrator.spec.globs import Globs
from orchestrator.spec.paths import Paths
from orchestrator.spec.plain_files import NotPlainFileError, open_plain, read_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

CHUNK_BYTES: Final = 4 * 1024 * 1024
CACHE_BYTES: Final = 2 * 1024**3
YOUNG_SECONDS: Final = 60.0  # a younger file may belong to a job that started after the caller listed the live ones
FAILURES: Final = (OSError,)
"""The errors that the daemon handles."""
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

    @called
    def missing_blobs(self, job_id: str, wanted: Sequence[str]) -> list[str]:
        """Return the archive's blobs that must be sent; none when the job's working copy exists."""
        if self.paths.work(job_id).exists():
            return []
        return [digest for digest in wanted if not self.paths.blob(digest).exists()]

    @called
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

    @called
    def lay_out(self, job_id: str, digest: str) -> str:
        """Create the job's working copy from stored blobs, or an empty one without a digest. Returns its path."""
        work = self.paths.work(job_id)
        if digest:
            lay_out(digest, self.paths.blob, work)
        else:
            work.mkdir(parents=True, exist_ok=True)
        return str(work)

    @called
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

    @called
    def exit_records(self, job_id: str) -> dict[tuple[int, int], bytes]:
        """Return every exit record of the job here, by attempt and rank."""
        found = {}
        for path in self.paths.exits(job_id).glob("attempt-*/rank-*.json"):
            if match := _EXIT.search(path.as_posix()):
                with contextlib.suppress(OSError):  # an invalid record counts as absent
                    found[int(match[1]), int(match[2])] = read_plain(path, MAX_RECORD_BYTES, real=True)
        return found

    @called
    def find_outputs(self, job_id: str, patterns: Sequence[str], max_bytes: int) -> Outputs:
        """Call the function of the same name for the job's working copy."""
        return find_outputs(self.paths.work(job_id), patterns, max_bytes)

    @called
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


MAX_OUTPUTS: Final = 50_000
FIND_SECONDS: Final = 45.0
"""Less than a call of a node's agent may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A file that an ``outputs`` pattern matches: its path below the working copy, its size, its permission bits."""

    path: str
    size_bytes: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The files to collect, how many files (and bytes) exceed the limits, and what could not be searched."""

    files: tuple[Output, ...]
    left_files: int = 0
    left_bytes: int = 0
    unread: trees.Problems = field(default_factory=trees.Problems)


def lay_out(digest: str, blob: Callable[[str], Path], target: Path) -> None:
    """Create a writable copy of the archive at ``target``; an existing copy, which is complete and on disk, is kept.

    Raises ValueError for an archive that is damaged or leads out of the copy, OSError.
    """
    if target.is_symlink():
        raise ValueError(f"{target} is a link; remove it")
    if target.exists():
        return
    manifest = json.loads(blob(digest).read_bytes())
    _refuse_ways_out(manifest["entries"])
    draft = target.with_name(f"{target.name}.laying-out")
    trees.remove(draft)
    draft.mkdir(parents=True)
    for entry in manifest["entries"]:
        path = draft / entry["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        match entry["type"]:
            case "directory":
                path.mkdir(exist_ok=True)
            case "link":
                path.symlink_to(entry["target"])
            case _:
                shutil.copyfile(blob(entry["digest"]), path)
                path.chmod(entry["mode"])
    _refuse_links_out(draft, manifest["entries"])
    sync_tree(draft)
    draft.replace(target)
    sync_directory(target.parent)


def renew(digest: str, blob: Callable[[str], Path], target: Path, boot: Path) -> None:
    """Replace a copy that no rank has used yet by a new one from the checked archive, unless ``boot`` names this boot of the machine.

    Without an archive the copy is an empty directory. Raises ValueError for a damaged archive, OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        if boot.read_text("ascii", errors="replace") == boot_id():
            return
    if not digest:
        target.mkdir(parents=True, exist_ok=True)
        return
    for needed in digests(digest, blob):
        with blob(needed).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != needed:
                raise ValueError(
                    f"the archive of the working directory is damaged: {blob(needed)}; submit the job again"
                )
    if not target.is_symlink():  # lay_out refuses one
        trees.remove(target)
    lay_out(digest, blob, target)
    write_whole(boot, boot_id().encode())


def _refuse_ways_out(entries: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError when an entry would be written outside of the working copy."""
    links = {entry["path"] for entry in entries if entry["type"] == "link"}
    for entry in entries:
        path = PurePosixPath(entry["path"])
        below_a_link = any(str(parent) in links for parent in path.parents)
        if path.is_absolute() or ".." in path.parts or not path.parts or below_a_link:
            raise ValueError(
                f"the archive's entry {entry['path']!r} leads out of the working copy; nothing was written"
            )


def _refuse_links_out(draft: Path, entries: Sequence[Mapping[str, str]]) -> None:
    """Raise ValueError, and leave nothing, when a relative link leads out of the working copy: an archive has none.

    An absolute link is the submitter's own to another place, and is kept.
    """
    root = os.path.realpath(draft)
    for entry in entries:
        if entry["type"] != "link" or entry["target"].startswith("/"):
            continue
        leads_to = os.path.realpath(draft / entry["path"])  # does not raise for a loop
        if leads_to != root and not leads_to.startswith(f"{root}/"):
            trees.remove(draft)
            raise ValueError(
                f"the archive's link {entry['path']!r} leads to {entry['target']!r}, out of the working copy"
            )


def digests(digest: str, blob: Callable[[str], Path]) -> list[str]:
    """Return every blob that an archive needs, its manifest first, each once."""
    entries = json.loads(blob(digest).read_bytes())["entries"]
    return list(dict.fromkeys([digest, *(entry["digest"] for entry in entries if "digest" in entry)]))


def find_outputs(work: Path, patterns: Sequence[str], max_bytes: int) -> Outputs:
    """Return the regular files below ``work`` that a pattern matches, by path, up to ``max_bytes``.

    Patterns are those of .gitignore, relative to ``work``: ``out/**`` matches all below out, ``*.pt`` the top
    directory. Links are not followed and not collected, so nothing outside of ``work`` is ever read. The search takes
    ``FIND_SECONDS`` at most. Raises ValueError for a link in place of ``work``.
    """
    unread = trees.Problems()
    globs = Globs(f"/{pattern}" for pattern in patterns)
    chosen: list[Output] = []
    size = left_files = left_bytes = 0
    until = time.monotonic() + FIND_SECONDS
    os.close(enter_below(work, ""))  # a link in its place is an error, also where nothing below is searched
    every = (each for below in _searched(patterns) for each in regular_files(work, unread, below=below, until=until))
    for found in sorted((each for each in every if globs.matches(each.path)), key=lambda each: each.path):
        if size + found.size_bytes > max_bytes or len(chosen) >= MAX_OUTPUTS:
            left_files, left_bytes = left_files + 1, left_bytes + found.size_bytes
            continue
        chosen.append(found)
        size += found.size_bytes
    return Outputs(files=tuple(chosen), left_files=left_files, left_bytes=left_bytes, unread=unread)


def _searched(patterns: Sequence[str]) -> list[str]:
    """Return the directories to search for files that the patterns match: ``out/**`` matches nothing outside of ``out``."""
    folders = set()
    for pattern in patterns:
        names = [name for name in pattern.split("/") if name not in ("", ".")]
        magic = next((number for number, name in enumerate(names) if set(name) & set("*?[\\")), len(names) - 1)
        folders.add("/".join(names[:magic]))
    return [
        one
        for one in sorted(folders)
        if not any(other != one and f"{one}/".startswith(f"{other}/" if other else "") for other in folders)
    ]


def regular_files(
    work: Path, unread: trees.Problems, *, below: str = "", until: float | None = None
) -> Iterator[Output]:
    """Yield every regular file in a directory, or ``below`` a part of it, without links; add to ``unread`` what cannot be listed.

    Raises ValueError for a link in place of the directory, OSError.
    """
    try:
        root = enter_below(work, below)
    except (ValueError, FileNotFoundError):
        if below:  # not there, or a file or a link, which is not followed
            return
        raise
    try:
        for found in trees.walk(root, unread, prefix=below, until=until):
            stop_if_abandoned()
            if found.is_file:
                mode = stat.S_IMODE(found.status.st_mode) & 0o777
                yield Output(path=found.path, size_bytes=found.status.st_size, mode=mode)
    finally:
        os.close(root)


def is_utf8(path: str) -> bool:
    """Whether a file's name is UTF-8."""
    return path.isprintable() or not any("\udc80" <= letter <= "\udcff" for letter in path)


def keep_output(work: Path, found: Output, target: Path) -> None:
    """Put a file of this node into the directory of outputs: a hard link, or a copy on another filesystem.

    Raises ValueError where a link leads out of ``work`` or ``target``, OSError.
    """
    parent, name = os.path.split(found.path)
    source = enter_below(work, parent)
    try:
        with new_output(target, found.path) as place:
            if place.holds(name, source):
                return
            try:
                os.link(name, place.draft, src_dir_fd=source, dst_dir_fd=place.folder, follow_symlinks=False)
            except OSError:
                with os.fdopen(open_output(source, name), "rb") as original, place.create(found.mode) as copy:
                    shutil.copyfileobj(original, copy)
            place.finish()
    finally:
        os.close(source)


def open_output(folder: int, name: str) -> int:
    """Open a regular file for reading. Raises PermissionError for anything else in its place, OSError."""
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PermissionError(f"{name!r} is not a regular file")
    return handle


class NewOutput:
    """A file being written to the directory of outputs: ``draft`` in ``folder`` (a descriptor) until ``finish``."""

    def __init__(self, folder: int, name: str) -> None:
        self.folder = folder
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[
            :16
        ]  # the file's name may already have the maximum length
        self.draft = f".{digest}.bringing"
        self._name = name
        self.discard()

    def holds(self, name: str, folder: int) -> bool:
        """Whether the output already exists and is the file ``name`` in ``folder``."""
        try:
            there = os.stat(self._name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.stat(name, dir_fd=folder, follow_symlinks=False))

    def create(self, mode: int) -> BinaryIO:
        """Create the empty draft."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.draft, flags, 0o600, dir_fd=self.folder)
        os.fchmod(handle, mode)
        return os.fdopen(handle, "wb")

    def finish(self) -> None:
        """Rename the draft to the output. Raises ValueError where it is not a regular file: a link was put in its place."""
        if not stat.S_ISREG(os.stat(self.draft, dir_fd=self.folder, follow_symlinks=False).st_mode):
            raise ValueError(f"{self._name!r} is not a regular file; it was not copied")
        os.replace(self.draft, self._name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def discard(self) -> None:
        """Remove a draft that was not finished."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.draft, dir_fd=self.folder)


@contextlib.contextmanager
def new_output(target: Path, relative: str) -> Iterator[NewOutput]:
    """Return a place for a file below ``target``, its directory created. Raises ValueError for a path that leads out of it.

    No link on the way is followed, ``target`` itself included: a rank can have created one.
    """
    parent, name = os.path.split(relative)
    if relative.startswith("/") or name in ("", ".", ".."):
        raise ValueError(f"{relative!r} leads out of {target}; nothing was written")
    folder = enter_below(target.parent, f"{target.name}/{parent}", make=True)
    try:
        place = NewOutput(folder, name)
        try:
            yield place
        finally:
            place.discard()
    finally:
        os.close(folder)
