"""Reads which steps a ``.wandb`` file has: a log in LevelDB's format of wandb's own records.

wandb keeps points in memory for some seconds. The points in this file survive a kill.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from wandb.proto.wandb_internal_pb2 import Record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IDENTITY: Final = b":W&B"
BLOCK_BYTES: Final = 32768
HEADER: Final = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class WandbFile:
    """One file; each reading continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 7
        self.newest = -1

    def read_on(self) -> int:
        """Return the highest step of a complete record so far; -1 for none."""
        try:
            with self._path.open("rb") as file:
                if file.read(len(IDENTITY)) != IDENTITY:
                    return -1
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return self.newest
        for body, end in _records(data, self._offset):
            self._offset = end
            record = Record()
            record.ParseFromString(body)
            if record.WhichOneof("record_type") == "history":
                self.newest = max(self.newest, record.history.step.num)
        return self.newest


def _records(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield complete records, each with the offset after it; stop at one that is cut off or damaged."""
    at = 0
    parts: list[bytes] = []
    while True:
        left = BLOCK_BYTES - (start + at) % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        if at + HEADER.size > len(data):
            return
        checksum, length, kind = HEADER.unpack_from(data, at)
        body = data[at + HEADER.size : at + HEADER.size + length]
        if len(body) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
            return
        if checksum != zlib.crc32(bytes((kind,)) + body):
            return
        at += HEADER.size + length
        parts = [*parts, body] if kind in (MIDDLE, LAST) else [body]
        if kind in (FULL, LAST):
            yield b"".join(parts), start + at
            parts = []
