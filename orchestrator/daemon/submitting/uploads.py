"""Working directories that remote submitters upload: pieces kept by content, put together for one submission.

A piece is at most ``MAX_PIECE_BYTES`` of a file, named by its SHA-256, and belongs to the user who sent it: no other user
learns that it is here. Nothing that a client names becomes a path before it is checked, and everything is laid out in a new
directory of the daemon's own, links last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.protocol import MAX_PIECE_BYTES
from orchestrator.daemon.submitting.upload_manifest import FileEntry, LinkEntry, read_manifest
from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.daemon.submitting.upload_manifest import Entry

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
                f"working_dir holds {size_bytes / 1e6:.0f} MB, the limit is {self._max_bytes / 1e6:.0f} MB",
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

    def _reserve(self, uid: int, size: int) -> None:
        """Count a piece of the user's. Raises RefusedError where there is no room for it."""
        with self._lock:
            held = self._held.get(uid)
            if held is None:
                held = sum(map(_size, self._pieces(uid)))
            if held + size > PILE * self._max_bytes:
                raise RefusedError(
                    f"your uploads hold {held / 1e6:.0f} MB, the limit is {PILE * self._max_bytes / 1e6:.0f} MB",
                    hint="pieces that no submission needs are removed after a day",
                )
            self._held[uid] = held + size

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
