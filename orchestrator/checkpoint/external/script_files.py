"""A script's own files: whether their formats prove them complete, facts about them, copies of those that are overwritten.

A zip file (torch.save, npz) ends with its table of contents, a safetensors file begins with the length of its content,
JSON has a definite end. Other formats show no end. The files are untrusted: only regular ones are opened, links are not
followed, and every read is bounded.

A hard link costs nothing, but shares later writes to the file: it protects only from scripts that replace the file by a
new one. Until a script is known to do that, the file is cloned (where the file system can share blocks between files)
or copied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import struct
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import trees
from orchestrator.abandoned import sha256_of
from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import tensorfile
from orchestrator.spec.plain_files import open_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

HEADER_LIMIT = 16 * 1024 * 1024
_ZIP_SUFFIXES = frozenset({"pt", "pth", "bin", "ckpt", "npz", "zip"})
_ZIP_END = struct.Struct("<4s4H2LH")
_ZIP64_LOCATOR = struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")
_LONGEST_COMMENT = 65_535
_IN_ZIP64 = 0xFFFFFFFF


def digest(path: str) -> tuple[int, str]:
    """Return size and SHA-256 of a regular file."""
    with FileIO(open_plain(Path(path))) as file:
        sha256, size = sha256_of(file)
        return size, sha256


def check(path: str) -> bool:
    """Whether the format proves the file complete; False where the format cannot prove it.

    Raises CorruptCheckpointError when the file is incomplete, OSError when it is not a regular file.
    """
    suffix = path.rpartition(".")[2]
    with FileIO(open_plain(Path(path))) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0 and suffix in (*_ZIP_SUFFIXES, "safetensors", "json"):
            raise CorruptCheckpointError(f"{path} is empty")
        if suffix == "safetensors":
            return _judge(path, _safetensors, file, size)
        if suffix == "json" and size <= HEADER_LIMIT:
            return _judge(path, _json, file, size)
        if file.read(2) == b"PK":  # whatever its name
            return _judge(path, _zip, file, size)
        return False


def _judge(path: str, whole: Callable[[FileIO, int], bool], file: FileIO, size: int) -> bool:
    file.seek(0)
    try:
        if whole(file, size):
            return True
    except (ValueError, struct.error, RecursionError, CorruptCheckpointError) as error:
        raise CorruptCheckpointError(f"{path} is torn or damaged: {error}") from error
    raise CorruptCheckpointError(f"{path} is torn")


def _json(file: FileIO, size: int) -> bool:
    json.loads(_read(file, size))
    return True


def _safetensors(file: FileIO, size: int) -> bool:
    length = int.from_bytes(_read(file, 8), "little")
    if length > min(HEADER_LIMIT, size - 8):
        return False
    file.seek(0)
    entries, _ = tensorfile.parse(_read(file, 8 + length), data_bytes=size - 8 - length)
    return max((entry.end for entry in entries), default=0) == size - 8 - length


def _zip(file: FileIO, size: int) -> bool:
    """Whether the file ends with a table of contents that fits it: it is written last."""
    tail_at = max(0, size - _ZIP_END.size - _LONGEST_COMMENT)
    file.seek(tail_at)
    tail = _read(file, size - tail_at)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _ZIP_END.size > len(tail):
        return False
    *_, table_bytes, table_at, comment = _ZIP_END.unpack_from(tail, at)
    if at + _ZIP_END.size + comment != len(tail):
        return False
    end = tail_at + at
    locator = at - _ZIP64_LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        _, _, record_at, _ = _ZIP64_LOCATOR.unpack_from(tail, locator)
        if not 0 <= record_at <= size - _ZIP64_END.size:
            return False
        file.seek(record_at)
        signature, *_, table_bytes, table_at = _ZIP64_END.unpack(_read(file, _ZIP64_END.size))
        end = record_at if signature == b"PK\x06\x06" else -1
    elif _IN_ZIP64 in (table_bytes, table_at):
        return False
    if table_at + table_bytes != end:
        return False
    file.seek(table_at)
    return table_bytes == 0 or _read(file, 4) == b"PK\x01\x02"


def _read(file: FileIO, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = file.read(size - len(content))
        if not piece:
            break
        content += piece
    return bytes(content)


Facts = dict[str, tuple[int, int]]
"""Size and modification time (ns) of each file, by its path in the checkpoint; a single file has the empty path."""


def facts_of(path: str) -> Facts:
    """Return the facts of every regular file of a checkpoint; links are left out."""
    found: Facts = {}
    if os.path.islink(path):
        return found
    if os.path.isfile(path):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            found[""] = (status.st_size, status.st_mtime_ns)
        return found
    for each in trees.walk(path, trees.Problems()):
        if each.is_file:
            found[each.path] = (each.status.st_size, each.status.st_mtime_ns)
    return found


def changed_at(path: str, facts: Facts) -> float:
    """Return when the checkpoint last changed: a file written, created or removed (seconds since the epoch)."""
    times = [mtime for _, mtime in facts.values()]
    for folder in (path, *(os.path.join(path, os.path.dirname(name)) for name in facts if name)):
        with contextlib.suppress(OSError):
            times.append(os.lstat(folder).st_mtime_ns)
    return max(times, default=0) / 1e9


def text(facts: Facts) -> str:
    """Return the facts as the registry stores them."""
    return json.dumps(sorted((name, *values) for name, values in facts.items()))


def member(path: str, name: str) -> str:
    """Return the path of a checkpoint's file."""
    return os.path.join(path, name) if name else path


def digests(path: str, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return size and SHA-256 of the named files of a checkpoint. Raises OSError."""
    return {name: list(digest(member(path, name))) for name in names}


def damage(path: str, files: Mapping[str, Sequence[Any]]) -> str:
    """Return how a checkpoint differs from the sizes and digests of ``files``; empty when it does not."""
    facts = facts_of(path)
    for name, (size, digest) in files.items():
        shown = name or Path(path).name
        if name not in facts:
            return f"{shown} is missing"
        if facts[name][0] != size:
            return f"{shown} has {facts[name][0]} bytes instead of {size}"
        try:
            found = digests(path, [name])[name][1]
        except OSError as error:
            return f"{shown} cannot be read: {error.strerror or error}"
        if found != digest:
            return f"{shown} was changed: its SHA-256 differs from the one registered"
    return ""


def delete(path: str) -> None:
    """Delete a file or a tree. Links are left alone."""
    if not os.path.islink(path):  # never followed, and not orch's
        trees.remove(path).left.refuse(path)


def kind(name: str) -> str:
    """Return a file's name without its numbers."""
    return re.sub(r"\d+", "#", name)


_FICLONE = 0x40049409  # linux/fs.h; Python has no name for it
_PIECE = 16 * 1024 * 1024


def take(source: str, target: Path, *, link: bool, most_bytes: int | None = None) -> None:
    """Copy the present content of ``source`` to ``target``, durably; by a hard link if allowed. Raises OSError.

    A file of more than ``most_bytes`` is only linked or cloned.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if link:
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target, follow_symlinks=False)
            return
    _copy(source, target, most_bytes)


def put_back(copy: Path, path: str) -> None:
    """Restore a copy to its file's place, atomically. The copy stays. Raises OSError."""
    draft = Path(f"{path}.orch-{os.getpid()}")
    try:
        _copy(str(copy), draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _copy(source: str, target: Path, most_bytes: int | None = None) -> None:
    with FileIO(open_plain(Path(source))) as readable:
        facts = os.fstat(readable.fileno())
        mode = facts.st_mode & 0o700
        handle = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, mode or 0o600)
        try:
            with FileIO(handle, "wb") as writable:
                if not _clone(readable.fileno(), handle):
                    _check_room(target, facts.st_size, most_bytes)
                    _copy_bytes(readable, writable, facts.st_size)
                os.fsync(handle)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _check_room(target: Path, size: int, most_bytes: int | None) -> None:
    if most_bytes is not None and size > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(target))
    free = os.statvfs(target.parent)
    if free.f_bavail * free.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _copy_bytes(source: FileIO, target: FileIO, size: int) -> None:
    """Copy up to ``size`` bytes."""
    while size and (piece := source.read(min(_PIECE, size))):
        size -= len(piece)
        view = memoryview(piece)
        while view:
            view = view[target.write(view) :]
