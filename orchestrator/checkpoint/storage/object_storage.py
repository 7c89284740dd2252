# ruff: noqa: D102 - Storage documents the methods
"""Checkpoints behind a URL: S3, and other stores that fsspec supports.

An object store has no directories to rename, no locks and nothing to fsync: an object exists completely or not at all.
A checkpoint is therefore committed by copying its objects to their final names, the manifest last. A name without a
manifest belongs to an interrupted commit or deletion; it is never listed, and is removed later.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from typing import TYPE_CHECKING, Any

from orchestrator.abandoned import stop_if_abandoned
from orchestrator.checkpoint.errors import CheckpointError
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import SMALL_BYTES, FileRecord
from orchestrator.spec.plain_files import refuse_larger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_CHUNK = 16 * 1024 * 1024


class ObjectStorage:
    """A prefix of an object store, given as a URL such as ``s3://bucket/path``.

    Credentials and endpoints are read as by the store's own tools (``AWS_*``, ``FSSPEC_*``); for S3, those in
    ``environ`` (a job's own variables) take precedence over this process's environment.
    """

    atomic_create = False

    def __init__(self, url: str, environ: Mapping[str, str] | None = None) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise CheckpointError(
                f"checkpoints at {url} need the package fsspec; install it for this Python"
            ) from error
        try:
            # Objects of other processes must be seen, so no listing is cached.
            self._fs, self._root = fsspec.core.url_to_fs(
                url.rstrip("/"), use_listings_cache=False, **_options(url, environ or {})
            )
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"checkpoints at {url} cannot be reached: {error}") from error
        self._url = url.rstrip("/")

    def write(self, path: str, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> FileRecord:  # noqa: ARG002 - the port's signature
        digest, size = hashlib.sha256(), 0
        with _as_os_errors(), self._fs.open(self._path(path), "wb") as file:
            for chunk in chunks:
                for start in range(0, len(chunk), _CHUNK):
                    piece = chunk[start : start + _CHUNK]
                    digest.update(piece)
                    file.write(piece)
                size += len(chunk)
        return FileRecord(bytes=size, sha256=digest.hexdigest())

    def create(self, path: str, content: bytes) -> bool:
        """Two concurrent calls may both succeed."""
        with _as_os_errors():
            if self._fs.exists(self._path(path)):
                return False
            self._fs.pipe_file(self._path(path), content)
            return True

    def replace(self, path: str, content: bytes, *, durable: bool = False) -> None:  # noqa: ARG002 - an object always is
        with _as_os_errors():
            self._fs.pipe_file(self._path(path), content)

    def read(self, path: str, most_bytes: int = SMALL_BYTES) -> memoryview:
        with _as_os_errors(), self._fs.open(self._path(path), "rb") as file:
            refuse_larger(int(file.size), most_bytes, self.location(path))
            content, at = memoryview(bytearray(int(file.size))), 0
            while piece := file.read(_CHUNK):
                content[at : at + len(piece)] = piece
                at += len(piece)
                stop_if_abandoned()
            return content[:at]

    def digest(self, path: str) -> FileRecord:
        digest, size = hashlib.sha256(), 0
        with _as_os_errors(), self._fs.open(self._path(path), "rb") as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
                size += len(piece)
                stop_if_abandoned()
        return FileRecord(bytes=size, sha256=digest.hexdigest())

    def names(self, path: str = "") -> list[str]:
        """Leave out checkpoints whose commit or deletion was interrupted."""
        found: dict[str, set[str]] = {}
        for key in self._keys(path):
            first, _, rest = key.partition("/")
            found.setdefault(first, set()).add(rest)
        return sorted(
            name for name, rest in found.items() if layout.parse_name(name) is None or layout.MANIFEST in rest
        )

    def rename(self, source: str, target: str) -> None:
        """Not atomic, but the target does not count before its manifest is there."""
        if self._is_there(target):
            raise FileExistsError(errno.EEXIST, "exists already", self.location(target))
        keys = self._keys(source)
        if not keys:
            raise FileNotFoundError(errno.ENOENT, "no such checkpoint", self.location(source))
        self._delete(target)  # left by an interrupted commit
        try:
            with _as_os_errors():
                for key in sorted(keys, key=lambda key: key == layout.MANIFEST):  # the manifest last
                    self._fs.cp_file(self._path(f"{source}/{key}"), self._path(f"{target}/{key}"))
        except FileNotFoundError:
            if self._is_there(target):  # another rank was faster, and has removed the source
                raise FileExistsError(errno.EEXIST, "exists already", self.location(target)) from None
            raise
        self.discard(source)

    def sync(self, path: str) -> None:
        """Do nothing: a written object is durable."""

    def remove(self, path: str) -> None:
        staged = layout.parse_staging(path)
        half_done = staged[0].name if staged is not None else layout.removed_name(path)
        if half_done != path and not self._is_there(half_done):
            self._delete(half_done)  # an interrupted commit or deletion
        self._delete(path)

    def discard(self, path: str) -> None:
        """Leave a note during the deletion: after an interruption the rest has no manifest, and is hidden."""
        if layout.parse_name(path) is None:
            self._delete(path)
            return
        note = layout.removing_name(path)
        self.replace(note, b"")
        self._delete(path)
        self._delete(note)

    def free_bytes(self) -> int | None:
        """Return None: unknown for an object store."""
        return None

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Exclude nothing: an object store has no locks."""
        yield False

    def location(self, path: str = "") -> str:
        return f"{self._url}/{path}" if path else self._url

    def _is_there(self, name: str) -> bool:
        """Whether a directory counts: a checkpoint needs its manifest, another one any object."""
        keys = self._keys(name)
        return layout.MANIFEST in keys if layout.parse_name(name) is not None else bool(keys)

    def _keys(self, path: str) -> list[str]:
        """Return the names of all objects below a path, relative to it."""
        prefix = self._path(path)
        with _as_os_errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(prefix)
            except FileNotFoundError:
                return []
        return [key[len(prefix) :].lstrip("/") for key in found if key.startswith(f"{prefix}/")]

    def _delete(self, path: str) -> None:
        with _as_os_errors():
            try:
                # The manifest first: without it there is no checkpoint any more, however far the deletion gets.
                for key in sorted(self._keys(path), key=lambda key: key != layout.MANIFEST):
                    self._fs.rm_file(self._path(f"{path}/{key}"))
                if self._fs.isfile(self._path(path)):
                    self._fs.rm_file(self._path(path))
            except FileNotFoundError:
                return

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)


def _options(url: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return s3fs options from a job's own variables; nothing for other stores."""
    if not url.startswith(("s3://", "s3a://")):
        return {}
    given = {
        "key": environ.get("AWS_ACCESS_KEY_ID"),
        "secret": environ.get("AWS_SECRET_ACCESS_KEY"),
        "token": environ.get("AWS_SESSION_TOKEN"),
        "endpoint_url": environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"),
    }
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    options: dict[str, Any] = {name: value for name, value in given.items() if value}
    return options | ({"client_kwargs": {"region_name": region}} if region else {})


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn every failure of the store into an OSError that does not count as damage of a file."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        if error.errno == errno.EIO:  # fsspec's code for any unknown answer
            raise _remote(error) from error
        raise
    except Exception as error:
        raise _remote(error) from error


def _remote(error: Any) -> OSError:
    return OSError(errno.EREMOTEIO, f"the object store failed: {type(error).__name__}: {error}")
