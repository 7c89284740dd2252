"""Slots read as files, for a process that is not the job's own: the rank actor.

A rank can truncate its slot at any moment. Reading a map of it would kill the reader (SIGBUS); a short read is an
ordinary error. Only the standard library is used here.
"""

from __future__ import annotations

import os
import struct
import weakref
from typing import TYPE_CHECKING, Self

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.snapshots.file import HEADER_BYTES, Slot, SlotDirectory, is_slot
from orchestrator.checkpoint.snapshots.shared_words import FileWords

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestrator.checkpoint.snapshots.shared_words import Words

PIECE_BYTES = 256 * 1024  # fits a core's cache while it is hashed and written
_WORD = struct.Struct("<Q")


class FileSlot(Slot):
    """One slot, read and written by system calls. Its file stays open while anything refers to it."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle
        weakref.finalize(self, os.close, handle)

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open an existing slot; None when there is none or it has another format."""
        try:
            slot = cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
            return slot if is_slot(slot.header()) else None
        except OSError:
            return None

    @property
    def size(self) -> int:
        """Return the file's present size in bytes."""
        return os.fstat(self._handle).st_size

    def word(self, at: int) -> int:
        """See Slot."""
        return int(_WORD.unpack(os.pread(self._handle, _WORD.size, at).ljust(_WORD.size, b"\0"))[0])

    def put_word(self, at: int, word: int) -> None:
        """See Slot."""
        os.pwrite(self._handle, _WORD.pack(word), at)

    def header(self) -> bytes:
        """See Slot."""
        return os.pread(self._handle, HEADER_BYTES, 0)

    def pieces(self, start: int, size: int) -> Iterator[memoryview]:
        """Yield these bytes of the slot, piece by piece, reusing one buffer.

        Raises CorruptCheckpointError when the file ends before.
        """
        buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
        end = start + size
        while start < end:
            count = os.preadv(self._handle, [buffer[: end - start]], start)
            if count == 0:
                raise CorruptCheckpointError(f"{self.path} was cut short while it was read")
            yield buffer[:count]
            start += count


class UnmappedDirectory(SlotDirectory[FileSlot]):
    """The snapshots of a job, for its rank actors."""

    def _slot_at(self, path: Path) -> FileSlot | None:
        return FileSlot.open(path)

    def _words_at(self, path: Path) -> Words:
        return FileWords(path)
