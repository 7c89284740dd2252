"""Archives the working directory at submission: stored by content, laid out as a writable copy per job.

An archive is a manifest (JSON, itself a blob) of paths, modes and digests. Files excluded by ``.gitignore`` or
``.orchignore`` and ``.git`` are left out. Links that lead out of the directory are refused, as is more than the limit.
Blobs are durable before the archive's digest is returned.

Remote submitters upload: pieces kept by content are put together for one submission. A piece is at most ``MAX_PIECE_BYTES`` of a file,
named by its SHA-256, and belongs to the user who sent it: no other user learns that it is here. Nothing that a client names becomes a
path before it is checked, and everything is laid out in a new directory of the daemon's own, links last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
import re
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.abandoned import sha256_of, stop_if_abandoned
from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.protocol import MAX_MANIFEST_BYTES, MAX_PIECE_BYTES
from orchestrator.durable_files import whole_file, write_whole
from orchestrator.private_files import make_private
from orchestrator.runtime.nodes.files import lay_out
from orchestrator.runtime.nodes.workdir_walk import (
    ALWAYS_IGNORED,
    IGNORE_FILES,
    MAX_COUNTED,
    MAX_DEPTH,
    MAX_FILES,
    Found,
    LeftOutCount,
    WorkdirError,
    link_target,
    refuse_too_large,
    walk,
)
from orchestrator.spec.plain_files import open_plain, read_plain
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.core.events import LeftOut

__all__ = ["Snapshot", "WorkdirError", "lay_out", "measure", "take"]

_CHUNK: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An archive: the manifest's digest, the number of files, their size in bytes."""

    digest: str = ""
    files: int = 0
    size_bytes: int = 0
    left_out: LeftOut | None = None


def take(directory: Path, blob: Callable[[str], Path], *, max_bytes: int, max_counted: int = MAX_COUNTED) -> Snapshot:
    """Archive ``directory``. ``blob`` returns a digest's file. Raises WorkdirError.

    At most ``max_counted`` excluded files are counted.
    """
    if not directory.is_dir():
        raise WorkdirError(f"working_dir {directory} is not a directory; set working_dir to one, or to null for none")
    left_out = LeftOutCount(most=max_counted)
    found = list(walk(directory, left_out))
    size_bytes = refuse_too_large(directory, found, max_bytes)
    entries = [_entry(f, directory, blob) for f in found]
    manifest = json.dumps({"version": 1, "entries": entries}, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(manifest).hexdigest()
    _store(manifest, blob(digest))
    return Snapshot(digest=digest, files=len(entries), size_bytes=size_bytes, left_out=left_out.counts())


def measure(directory: Path) -> tuple[int, int, LeftOut | None]:
    """Return the files and bytes that an archive would hold, and what it would exclude. Raises WorkdirError."""
    left_out = LeftOutCount()
    found = list(walk(directory, left_out))
    size_bytes = sum(f.status.st_size for f in found if stat.S_ISREG(f.status.st_mode))
    return len(found), size_bytes, left_out.counts()


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


MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 2048
MAX_HOPS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file, in pieces."""

    path: str
    size_bytes: int
    executable: bool
    pieces: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """A symbolic link: relative to another place of the directory, absolute to one outside."""

    path: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """An empty directory."""

    path: str


Entry = FileEntry | LinkEntry | DirectoryEntry


def read_manifest(text: bytes, *, max_bytes: int) -> tuple[Entry, ...]:
    """Return the entries. Raises BadRequestError for anything but a directory of at most ``max_bytes``."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise _invalid(f"it has {len(text)} bytes, {MAX_MANIFEST_BYTES} at most")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid("it is not JSON") from error
    items = found.get("entries") if isinstance(found, dict) and found.get("version") == 1 else None
    if not isinstance(items, list) or len(items) > MAX_FILES:
        raise _invalid(f"it is not of version 1 with at most {MAX_FILES} entries")
    entries = tuple(_file_entry(item) for item in items)
    _refuse_conflicts(entries)
    _refuse_links_out({entry.path: entry.target for entry in entries if isinstance(entry, LinkEntry)})
    total = sum(entry.size_bytes for entry in entries if isinstance(entry, FileEntry))
    if total > max_bytes:
        raise _invalid(f"its files have {total} bytes, {max_bytes} at most")
    return entries


def _file_entry(item: Any) -> Entry:
    if not isinstance(item, dict):
        raise _invalid("an entry is not an object")
    path = _path(item.get("path"))
    match item.get("type"):
        case "file":
            return FileEntry(
                path=path,
                size_bytes=_entry_size(item.get("size"), path),
                executable=item.get("executable") is True,
                pieces=_pieces(item.get("pieces"), item.get("size"), path),
            )
        case "link":
            return LinkEntry(path=path, target=_target(item.get("target"), path))
        case "directory":
            return DirectoryEntry(path=path)
    raise _invalid(f"{path!r} is neither a file, a link nor a directory")


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or len(_encoded(value)) > MAX_PATH_BYTES:
        raise _invalid(f"a path is text of at most {MAX_PATH_BYTES} bytes")
    names = value.split("/")
    if "\0" in value or any(name in {"", ".", ".."} or len(_encoded(name)) > MAX_NAME_BYTES for name in names):
        raise _invalid(f"{value!r} is not in the directory")
    if not ALWAYS_IGNORED.isdisjoint(names):
        raise _invalid(f"{value!r} is of a kind that is never copied ({', '.join(sorted(ALWAYS_IGNORED))})")
    if len(names) > MAX_DEPTH + 1:
        raise _invalid(f"{value!r} is more than {MAX_DEPTH} directories deep")
    return value


def _target(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value or len(_encoded(value)) > MAX_PATH_BYTES:
        raise _invalid(f"{path!r} has no valid target")
    if value.startswith("/") and posixpath.basename(path) in IGNORE_FILES:
        raise _invalid(f"{path!r} links to {value!r}, outside of the directory; it is read here: make it a file")
    return value


def _entry_size(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _invalid(f"{path!r} has no size")
    return value


def _pieces(value: Any, length: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(digest, str) for digest in value):
        raise _invalid(f"{path!r} has no pieces")
    if len(value) != -(-int(length) // MAX_PIECE_BYTES):
        raise _invalid(f"{path!r} has {len(value)} pieces for {length} bytes")
    return tuple(value)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(f"{text!r} is not UTF-8") from error


def _refuse_conflicts(entries: tuple[Entry, ...]) -> None:
    """Refuse a path that occurs twice, and an entry below another one: no file goes through a link."""
    leaves = {entry.path for entry in entries}
    if len(leaves) != len(entries):
        raise _invalid("it names a path twice")
    for entry in entries:
        above = posixpath.dirname(entry.path)
        while above:
            if above in leaves:
                raise _invalid(f"{entry.path!r} is below {above!r}, which is an entry of its own")
            above = posixpath.dirname(above)


def _refuse_links_out(links: Mapping[str, str]) -> None:
    """Refuse a relative link that leads out of the directory, by its own text or through other links.

    A client sends a link to a place outside as an absolute one, which is kept and reported; nothing here follows it.
    """
    for path, target in links.items():
        if target.startswith("/"):
            continue
        here, ahead, hops = path.split("/")[:-1], target.split("/")[::-1], 0
        while ahead and hops <= MAX_HOPS:  # more: a loop, which leads nowhere
            name = ahead.pop()
            through = links.get("/".join((*here, name)), "")
            if through.startswith("/") or (name == ".." and not here):
                raise _invalid(f"{path!r} links to {target!r}, outside of the directory")
            if through:
                hops += 1
                ahead += through.split("/")[::-1]
            elif name == "..":
                here.pop()
            elif name not in {"", "."}:
                here.append(name)


def _invalid(reason: str) -> BadRequestError:
    return BadRequestError(f"the upload's manifest is refused: {reason}", hint="send it with `orch submit`")


KEPT_SECONDS: Final = 24 * 3600.0
"""Time for which a piece is kept after an upload has last requested it: an upload can be resumed for this long."""

PILE: Final = 3
"""All pieces of a user are at most this many times the largest working directory."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_TREES: Final = "trees"


class Uploads:
    """The uploads below ``root``, each user's in a directory of their own; ``max_bytes`` is the largest working directory."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}

    def missing(self, uid: int, digests: Sequence[str], size_bytes: int, now: float) -> tuple[str, ...]:
        """Return the pieces to send for a directory of ``size_bytes``; those that are here are kept for another day.

        Raises RefusedError for a directory over the limit.
        """
        if size_bytes > self._max_bytes:
            raise RefusedError(
                f"working_dir holds {size(size_bytes)}, the limit is {size(self._max_bytes)}",
                hint="list data in .gitignore and read it from its own place on the daemon's machine",
            )
        self._drop_old(uid, now)
        with self._lock:
            self._held.pop(uid, None)  # counted again from what is there
        return tuple(digest for digest in dict.fromkeys(digests) if not _mark_used(self._piece(uid, digest), now))

    def put(self, uid: int, digest: str, data: bytes) -> None:
        """Keep a piece. Raises BadRequestError where its digest is another one, RefusedError beyond the user's limit."""
        target = self._piece(uid, digest)
        if not 0 < len(data) <= MAX_PIECE_BYTES:
            raise BadRequestError(f"a piece of {len(data)} bytes; one has 1 to {MAX_PIECE_BYTES}")
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise BadRequestError(f"piece {digest[:12]} arrived as {found[:12]}", hint="send it again")
        if target.exists():
            return
        self._reserve(uid, len(data))
        make_private(target.parent)
        handle, draft = tempfile.mkstemp(prefix=".draft-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as sink:
                sink.write(data)
            Path(draft).replace(target)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def _reserve(self, uid: int, more: int) -> None:
        """Count a piece of the user's. Raises RefusedError where there is no room for it."""
        with self._lock:
            held = self._held.get(uid)
            if held is None:
                held = sum(map(_size, self._pieces(uid)))
            if held + more > PILE * self._max_bytes:
                raise RefusedError(
                    f"your uploads hold {size(held)}, the limit is {size(PILE * self._max_bytes)}",
                    hint="pieces that no submission needs are removed after a day",
                )
            self._held[uid] = held + more

    def lay_out(self, uid: int, manifest: Sequence[str]) -> Path:
        """Return a new directory with the content that the pieces of ``manifest`` describe.

        Raises BadRequestError for a manifest that is not one or names a piece that is not here.
        """
        text = b"".join(self._read(uid, digest) for digest in manifest)
        entries = read_manifest(text, max_bytes=self._max_bytes)
        trees = self._root / str(uid) / _TREES
        make_private(trees)
        target = Path(tempfile.mkdtemp(dir=trees))
        try:
            self._fill(uid, entries, target)
        except BaseException:
            self.remove(target)
            raise
        return target

    def remove(self, directory: Path) -> None:
        """Remove what ``lay_out`` made."""
        trees.remove(directory)

    def _fill(self, uid: int, entries: Sequence[Entry], target: Path) -> None:
        links = []
        for entry in entries:
            path = target / entry.path
            if isinstance(entry, LinkEntry):
                links.append((path, entry.target))
            elif isinstance(entry, FileEntry):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write(uid, entry, path)
            else:
                path.mkdir(parents=True, exist_ok=True)
        for path, link in links:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(link)

    def _write(self, uid: int, entry: FileEntry, path: Path) -> None:
        written = 0
        with path.open("xb") as sink:
            os.fchmod(sink.fileno(), 0o700 if entry.executable else 0o600)
            for digest in entry.pieces:
                data = self._read(uid, digest)
                written += len(data)
                if written > entry.size_bytes:
                    break
                sink.write(data)
        if written != entry.size_bytes:
            raise BadRequestError(f"{entry.path} has {entry.size_bytes} bytes, its pieces have {written}")

    def _read(self, uid: int, digest: str) -> bytes:
        """Return a piece. One that differs from its digest, as after a power cut, is removed, so that it is sent again."""
        path = self._piece(uid, digest)
        with contextlib.suppress(FileNotFoundError):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == digest:
                return data
            path.unlink()
        raise BadRequestError(f"piece {digest[:12]} of the upload is not here", hint="submit again")

    def _piece(self, uid: int, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise BadRequestError("a piece is named by its SHA-256, 64 hexadecimal digits")
        return self._root / str(uid) / digest[:2] / digest

    def _pieces(self, uid: int) -> Iterator[Path]:
        return (self._root / str(uid)).glob("[0-9a-f][0-9a-f]/*")

    def _drop_old(self, uid: int, now: float) -> None:
        """Remove pieces that no upload has requested lately, and directories that a killed daemon left laid out."""
        for path in (*self._pieces(uid), *(self._root / str(uid) / _TREES).glob("*")):
            with contextlib.suppress(FileNotFoundError):
                if now - path.stat().st_mtime <= KEPT_SECONDS:
                    continue
                trees.remove(path)


def _size(path: Path) -> int:
    """Return the bytes of a piece; 0 for one that another request has removed, or given its name, meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _mark_used(path: Path, now: float) -> bool:
    try:
        os.utime(path, (now, now))
    except FileNotFoundError:
        return False
    return True
