"""Checks whether a script's file is complete, by its format. Reads no more than necessary.

A zip file (torch.save, npz) ends with its table of contents, a safetensors file begins with the length of its content,
JSON has a definite end. Other formats show no end. The files are untrusted: only regular ones are opened, links are not
followed, and every read is bounded.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from typing import TYPE_CHECKING, BinaryIO

from orchestrator.abandoned import sha256_of
from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import tensorfile

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER_LIMIT = 16 * 1024 * 1024
_ZIP_SUFFIXES = frozenset({"pt", "pth", "bin", "ckpt", "npz", "zip"})
_ZIP_END = struct.Struct("<4s4H2LH")
_ZIP64_LOCATOR = struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")
_LONGEST_COMMENT = 65_535
_IN_ZIP64 = 0xFFFFFFFF


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else, links included; never waits."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.fdopen(handle, "rb", buffering=0)


def digest(path: str) -> tuple[int, str]:
    """Return size and SHA-256 of a regular file."""
    with open_regular(path) as file:
        sha256, size = sha256_of(file)  # type: ignore[arg-type]  # an unbuffered file reads into a buffer
        return size, sha256


def check(path: str) -> bool:
    """Whether the format proves the file complete; False where the format cannot prove it.

    Raises CorruptCheckpointError when the file is incomplete, OSError when it is not a regular file.
    """
    suffix = path.rpartition(".")[2]
    with open_regular(path) as file:
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


def _judge(path: str, whole: Callable[[BinaryIO, int], bool], file: BinaryIO, size: int) -> bool:
    file.seek(0)
    try:
        if whole(file, size):
            return True
    except (ValueError, struct.error, RecursionError, CorruptCheckpointError) as error:
        raise CorruptCheckpointError(f"{path} is torn or damaged: {error}") from error
    raise CorruptCheckpointError(f"{path} is torn")


def _json(file: BinaryIO, size: int) -> bool:
    json.loads(_read(file, size))
    return True


def _safetensors(file: BinaryIO, size: int) -> bool:
    length = int.from_bytes(_read(file, 8), "little")
    if length > min(HEADER_LIMIT, size - 8):
        return False
    file.seek(0)
    entries, _ = tensorfile.parse(_read(file, 8 + length), data_bytes=size - 8 - length)
    return max((entry.end for entry in entries), default=0) == size - 8 - length


def _zip(file: BinaryIO, size: int) -> bool:
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


def _read(file: BinaryIO, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = file.read(size - len(content))
        if not piece:
            break
        content += piece
    return bytes(content)
