"""Pages of 64-bit words shared by the ranks of a job and their persisters: the held version, the state of storage.

Ranks map them: a save reads them without a system call. A persister reads and writes them as files, because a rank can
truncate a file, and reading a map of it would kill the persister (SIGBUS). Only the standard library is used here.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from typing import TYPE_CHECKING, Protocol

from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_WORD_BYTES = 8


class Words(Protocol):
    """A page of words. A word beyond the end of the file reads as 0."""

    def get(self, index: int) -> int:
        """Return one word."""
        ...

    def some(self, first: int, count: int) -> Sequence[int]:
        """Return several words."""
        ...

    def put(self, index: int, word: int) -> None:
        """Write one word."""
        ...

    def close(self) -> None:
        """Close the page; it cannot be used afterwards."""
        ...


class MappedWords:
    """A mapped page, for the ranks."""

    def __init__(self, path: Path) -> None:
        handle = _page(path)
        try:
            self._page = mmap.mmap(handle, mmap.PAGESIZE)
        finally:
            os.close(handle)
        self._words = memoryview(self._page).cast("Q")

    def get(self, index: int) -> int:
        """See Words."""
        return self._words[index]

    def some(self, first: int, count: int) -> Sequence[int]:
        """See Words."""
        return self._words[first : first + count]

    def put(self, index: int, word: int) -> None:
        """See Words."""
        self._words[index] = word

    def close(self) -> None:
        """See Words."""
        self._words.release()
        self._page.close()


class FileWords:
    """A page for other processes: each access is a system call, which is safe for a file of any length."""

    def __init__(self, path: Path) -> None:
        self._handle = _page(path)
        self._close = weakref.finalize(self, os.close, self._handle)

    def get(self, index: int) -> int:
        """See Words."""
        return self.some(index, 1)[0]

    def some(self, first: int, count: int) -> Sequence[int]:
        """See Words."""
        raw = os.pread(self._handle, count * _WORD_BYTES, first * _WORD_BYTES)
        return struct.unpack(f"={count}Q", raw.ljust(count * _WORD_BYTES, b"\0"))

    def put(self, index: int, word: int) -> None:
        """See Words."""
        os.pwrite(self._handle, struct.pack("=Q", word), index * _WORD_BYTES)

    def close(self) -> None:
        """See Words."""
        self._close()


def _page(path: Path) -> int:
    """Return a descriptor of the page, created if missing. Raises OSError."""
    make_private(path.parent)
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, mmap.PAGESIZE)
    except BaseException:
        os.close(handle)
        raise
    return handle


class HeldVersion:
    """A 64-bit word that all ranks and rank actors of a node share.

    It holds an identity: every rank keeps its first snapshot from that version on until the word changes. So the
    persisters of all ranks find snapshots of the same step, although no rank waits for another.
    """

    def __init__(self, words: Words) -> None:
        self._words = words

    def get(self) -> int:
        """Return the held identity, 0 for none."""
        return self._words.get(0)

    def set(self, word: int) -> None:
        """Hold another identity; 0 releases it."""
        self._words.put(0, word)

    def close(self) -> None:
        """Close the page."""
        self._words.close()


class StoreState:
    """A page of 64-bit words by which a rank's persister informs the rank, and rank 0 the persisters of all ranks.

    A rank waits for storage only while its persister reports that it writes all wanted snapshots and that storage works.
    """

    _SERVED, _FAILING, _WANTED, _WANTED_WORDS = 0, 1, 8, 64

    def __init__(self, words: Words) -> None:
        self._words = words

    @property
    def takes_all(self) -> bool:
        """Whether a persister stores every wanted snapshot, and its last write did not fail."""
        return self.serves and self._words.get(self._FAILING) == 0

    @property
    def serves(self) -> bool:
        """Whether a persister handles this rank's snapshots."""
        return self._words.get(self._SERVED) == 1

    def serve(self, *, serving: bool) -> None:
        """Record whether a persister handles this rank's snapshots."""
        self._words.put(self._SERVED, int(serving))

    def fail(self, *, failing: bool) -> None:
        """Record whether the last write to storage failed."""
        self._words.put(self._FAILING, int(failing))

    def wanted(self) -> frozenset[int]:
        """Return the identities that this rank, rank 0 of a gang, requires on storage; the newest 64."""
        return frozenset(self._words.some(self._WANTED, self._WANTED_WORDS)) - {0}

    def publish_wanted(self, words: Iterable[int]) -> None:
        """Publish the identities that every rank of the gang must write to storage."""
        newest = sorted(words)[-self._WANTED_WORDS :]
        for index in range(self._WANTED_WORDS):
            self._words.put(self._WANTED + index, newest[index] if index < len(newest) else 0)

    def close(self) -> None:
        """Close the page."""
        self._words.close()
