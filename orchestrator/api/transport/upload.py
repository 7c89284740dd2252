"""Uploads a working directory to a daemon on another machine, in pieces that are named by the digest of their content.

The daemon returns the pieces that it does not have, so that an interrupted upload, or the next one of nearly the same
directory, sends only these. Files that ignore files exclude are not sent, as in a submission on the daemon's machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, DeadlineError, RefusedError
from orchestrator.api.protocol import API_PREFIX, MAX_ASKED_PIECES, MAX_MANIFEST_BYTES, MAX_PIECE_BYTES
from orchestrator.api.transport import wire
from orchestrator.runtime.nodes.workdir_walk import LeftOutCount, WorkdirError, link_target, walk
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.core.events import LeftOut
    from orchestrator.runtime.nodes.workdir_walk import Found

PIECE_SECONDS = 120.0
PATIENCE_SECONDS = 300.0
"""Time for which a piece is sent again while the daemon is unreachable."""

LONGEST_PAUSE_SECONDS = 2.0


class Uploaded(NamedTuple):
    """An upload: the manifest's pieces, which a submission names; ``sent_bytes`` of ``size_bytes`` were sent."""

    manifest: tuple[str, ...]
    files: int
    size_bytes: int
    sent_bytes: int
    left_out: LeftOut | None


class _Place(NamedTuple):
    """Source of a piece: a file at an offset, or ``data``."""

    path: Path | None
    offset: int
    size: int
    data: bytes = b""


class Uploader:
    """One upload; ``progress`` is called with the bytes sent so far and the bytes to send in all."""

    def __init__(
        self,
        endpoint: Endpoint,
        progress: Callable[[int, int], None],
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._endpoint, self._progress, self._patience_seconds = endpoint, progress, patience_seconds

    def upload(self, directory: Path) -> Uploaded:
        """Upload the content of ``directory`` that the daemon does not have.

        Raises BadRequestError for a directory that cannot be uploaded, RefusedError for one that changes meanwhile or
        is over the daemon's limit, DaemonUnreachableError.
        """
        if not directory.is_dir():
            raise BadRequestError(
                f"working_dir {directory} is not a directory", hint="make it, or set working_dir: null"
            )
        left_out = LeftOutCount()
        places: dict[str, _Place] = {}
        try:
            found = list(walk(directory, left_out))
            entries = [_entry(each, directory, places) for each in found]
        except WorkdirError as error:
            raise BadRequestError(str(error), hint="nothing was submitted") from error
        size = sum(each.status.st_size for each in found if stat.S_ISREG(each.status.st_mode))
        manifest = tuple(_manifest_pieces(entries, places))
        missing = self._missing(list(places), size)
        self._send({digest: places[digest] for digest in missing})
        sent = sum(places[digest].size for digest in missing)
        return Uploaded(manifest, len(found), size, sent, left_out.counts())

    def _missing(self, digests: list[str], size: int) -> list[str]:
        missing: list[str] = []
        for first in range(0, len(digests), MAX_ASKED_PIECES):
            asked = digests[first : first + MAX_ASKED_PIECES]
            body = {"digests": asked, "size_bytes": size}
            reply = wire.call(self._endpoint, "POST", f"{API_PREFIX}/pieces", body=body, deadline_seconds=PIECE_SECONDS)
            known = set(asked)
            missing += [digest for digest in reply["missing"] if digest in known]
        return missing

    def _send(self, places: dict[str, _Place]) -> None:
        total, done = sum(place.size for place in places.values()), 0
        self._progress(done, total)
        for digest, place in places.items():
            self._send_piece(digest, _read(digest, place))
            done += place.size
            self._progress(done, total)

    def _send_piece(self, digest: str, data: bytes) -> None:
        """Send the piece until the daemon has it; sending it twice is harmless, because its name is its digest."""
        deadline, pause = time.monotonic() + self._patience_seconds, 0.05
        while True:
            try:
                return wire.send(self._endpoint, f"{API_PREFIX}/pieces/{digest}", data, deadline_seconds=PIECE_SECONDS)
            except (DaemonUnreachableError, DeadlineError):
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _entry(found: Found, root: Path, places: dict[str, _Place]) -> dict[str, object]:
    mode = found.status.st_mode
    if stat.S_ISDIR(mode):
        return {"path": found.relative, "type": "directory"}
    if stat.S_ISLNK(mode):
        return {"path": found.relative, "type": "link", "target": link_target(found, root)}
    if not stat.S_ISREG(mode):
        raise WorkdirError(f"{found.path} is neither a file, a directory nor a link; list it in .gitignore")
    pieces: list[tuple[str, int]] = []
    try:
        with os.fdopen(open_plain(found.path), "rb") as file:
            while data := file.read(MAX_PIECE_BYTES):
                digest = hashlib.sha256(data).hexdigest()
                places.setdefault(digest, _Place(found.path, len(pieces) * MAX_PIECE_BYTES, len(data)))
                pieces.append((digest, len(data)))
    except OSError as error:
        raise WorkdirError(f"{found.path}: {error.strerror}; make it readable or list it in .gitignore") from error
    return {
        "path": found.relative,
        "type": "file",
        "executable": bool(mode & 0o100),
        "size": sum(size for _, size in pieces),
        "pieces": [digest for digest, _ in pieces],
    }


def _manifest_pieces(entries: list[dict[str, object]], places: dict[str, _Place]) -> Iterator[str]:
    try:
        text = json.dumps({"version": 1, "entries": entries}, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise BadRequestError("a file's name is not UTF-8", hint="rename it, or list it in .gitignore") from error
    if len(text) > MAX_MANIFEST_BYTES:
        raise BadRequestError(
            f"working_dir has {len(entries)} files: too many to upload", hint="list what is not code in .gitignore"
        )
    for first in range(0, len(text), MAX_PIECE_BYTES):
        data = text[first : first + MAX_PIECE_BYTES]
        digest = hashlib.sha256(data).hexdigest()
        places[digest] = _Place(None, 0, len(data), data)
        yield digest


def _read(digest: str, place: _Place) -> bytes:
    if place.path is None:
        return place.data
    try:
        with os.fdopen(open_plain(place.path), "rb") as file:
            file.seek(place.offset)
            data = file.read(place.size)
    except OSError as error:
        raise RefusedError(f"{place.path}: {error.strerror}", hint="submit again when it is at rest") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise RefusedError(
            f"{place.path} changes while it is read", hint="submit again when it is at rest, or list it in .gitignore"
        )
    return data
