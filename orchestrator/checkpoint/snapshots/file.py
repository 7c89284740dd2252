"""Files in shared memory that hold a rank's snapshots: format, opening, and the distinction of torn and complete ones.

Each rank has up to three slots ``rank-00000.0.snap`` ... in the job's snapshot directory. A slot holds for each part of
the state its JSON text and the image of its tensor file, byte for byte as on storage: persisting a snapshot copies
memory to a file and needs no knowledge of tensors.

A slot's *identity* (attempt and step in one 64-bit word) is zero during a write and is set last. A process killed in
the middle leaves zero; a reader checks that the identity is the same before and after reading. Only the standard
library is used here.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.available_memory import available_memory_bytes
from orchestrator.checkpoint.snapshots.shared_words import HeldVersion, MappedWords, StoreState
from orchestrator.checkpoint.snapshots.writer_lock import SnapshotUnavailableError, WriterLock

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from orchestrator.checkpoint.snapshots.shared_words import Words

HEADER_BYTES = 16 * 1024
SLOTS = 3  # the newest, the one being written, and one that is being persisted
MOST_OF_AVAILABLE = 0.9  # the rest is for allocations of other processes
_MAGIC = b"ORCHSNAP"
_FORMAT = 1
_HEAD = struct.Struct("<8sII")
_IDENTITY = struct.Struct("<Q")
_IDENTITY_AT = 64  # on its own cache line
_WANTED_AT = 72  # the identity of a snapshot that must reach storage
_STORED_AT = 80  # the identity of the snapshot that has reached it, or never will
_META = struct.Struct("<II")  # length and CRC-32 of the JSON that follows
_META_AT = 128
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it yet
_PART_NAME = re.compile(r"state|(?:rank|shard)-\d{5,10}")
_TOKEN = re.compile(r"[A-Za-z0-9_.-]{0,128}")
_STEP_BITS = 40
_MAX_STEP = 2**_STEP_BITS - 1
_MAX_ATTEMPT = 2**23
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SnapshotUnavailableError)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRegion:
    """The position of one part in its slot: JSON text and tensor file image, each as offset and length in bytes."""

    name: str
    tree_at: int
    tree_bytes: int
    image_at: int
    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMeta:
    """Attempt, step and parts of a snapshot. ``gang``: every rank has one of the same step, and they only count together."""

    job_id: str
    attempt: int
    step: int
    rank: int
    world_size: int
    token: str
    gang: bool
    created_at: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[PartRegion, ...]

    @property
    def version(self) -> Version:
        """Attempt and step."""
        return Version(attempt=self.attempt, step=self.step)


def identity(version: Version) -> int:
    """Return the word that names a snapshot; never zero, ordered as versions are.

    Raises SnapshotUnavailableError for numbers beyond what fits: steps of 2**40, attempts of 2**23.
    """
    if version.step > _MAX_STEP or not 0 <= version.attempt <= _MAX_ATTEMPT:
        raise SnapshotUnavailableError(f"step {version.step} of attempt {version.attempt} is too large for a snapshot")
    return (version.attempt + 1) << _STEP_BITS | version.step


def version_of(word: int) -> Version | None:
    """Return the version of an ``identity``; None for zero."""
    return None if word == 0 else Version(attempt=(word >> _STEP_BITS) - 1, step=word & _MAX_STEP)


class Slot(ABC):
    """The header of a slot, independent of how its bytes are read."""

    path: Path

    @property
    @abstractmethod
    def size(self) -> int:
        """Return the slot's present size in bytes."""

    @abstractmethod
    def word(self, at: int) -> int:
        """Return the word at this offset; 0 where the file ends before it."""

    @abstractmethod
    def put_word(self, at: int, word: int) -> None:
        """Write a word."""

    @abstractmethod
    def header(self) -> bytes:
        """Return the first ``HEADER_BYTES``, or fewer in a shorter file."""

    def identity(self) -> int:
        """Return the identity of the snapshot in the slot; 0 when there is none, or it is being written."""
        return self.word(_IDENTITY_AT)

    def mark_stored(self, word: int) -> None:
        """Record that the rank's part of the snapshot of this identity is on storage, or never will be."""
        self.put_word(_STORED_AT, word)

    def pending(self, wanted: Container[int] = ()) -> int:
        """Return the identity of the snapshot in the slot if it must still reach storage, else 0.

        ``wanted`` holds the identities that rank 0 requires on storage.
        """
        word = self.identity()
        if word == 0 or self.word(_STORED_AT) == word:
            return 0
        return word if word in wanted or self.word(_WANTED_AT) == word else 0

    def meta(self) -> SnapshotMeta | None:
        """Return the snapshot's metadata; None when it does not count or changed while it was read."""
        before = self.identity()
        header = self.header() if before else b""
        if len(header) != HEADER_BYTES:
            return None
        length, crc = _META.unpack_from(header, _META_AT)
        raw = header[_META_AT + _META.size :][:length]
        if zlib.crc32(raw) != crc or self.identity() != before:
            return None
        try:
            meta = _meta_from(json.loads(raw), self.size)
            return meta if identity(meta.version) == before else None
        except _MALFORMED:
            return None  # no version writes that

    def holds(self, meta: SnapshotMeta) -> bool:
        """Whether this is still the snapshot that ``meta`` describes."""
        return self.identity() == identity(meta.version)


S = TypeVar("S", bound=Slot)


class SnapshotSlot(Slot):
    """One mapped slot. Its memory stays mapped while anything refers to it.

    Only for the job's own processes: reading the map of a truncated file kills the reader. Others use unmapped.py.
    """

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path, self.memory = path, memory

    @property
    def size(self) -> int:
        """Return the number of mapped bytes."""
        return len(self.memory)

    def word(self, at: int) -> int:
        """See Slot."""
        return int(_IDENTITY.unpack_from(self.memory, at)[0])

    def put_word(self, at: int, word: int) -> None:
        """See Slot."""
        _IDENTITY.pack_into(self.memory, at, word)

    def header(self) -> bytes:
        """See Slot."""
        return self.memory[:HEADER_BYTES]

    @classmethod
    def create(cls, path: Path, size: int) -> Self:
        """Create a blank slot of ``size`` bytes in place of any existing one.

        Its pages are reserved at once, so that missing shared memory is an error here, not a SIGBUS later. The
        reservation also leaves the memory that the machine's processes need: the kernel would otherwise kill one of
        them.
        """
        left = available_memory_bytes()
        if left is not None and size > left * MOST_OF_AVAILABLE:
            raise SnapshotUnavailableError(
                f"no room for a snapshot of {size} bytes: {left} bytes of memory are left on this machine"
            )
        draft = path.with_suffix(".new")
        handle = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            memory = mmap.mmap(handle, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            draft.unlink()
            raise SnapshotUnavailableError(f"{path.parent}: no room for a snapshot of {size} bytes: {error}") from error
        finally:
            os.close(handle)
        _HEAD.pack_into(memory, 0, _MAGIC, _FORMAT, HEADER_BYTES)
        draft.replace(path)
        return cls(path, memory)

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open an existing slot; None when there is none or it has another format."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(handle).st_size
            if size < HEADER_BYTES:
                return None
            memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        slot = cls(path, memory)
        if not is_slot(slot.header()):
            memory.close()
            return None
        return slot

    def prefault(self) -> None:
        """Map all pages at once, where the kernel can: before reading everything, not before reading the header."""
        with contextlib.suppress(OSError, ValueError):
            self.memory.madvise(_MADV_POPULATE_READ)

    def begin(self) -> None:
        """Invalidate the slot's content."""
        _IDENTITY.pack_into(self.memory, _IDENTITY_AT, 0)
        _IDENTITY.pack_into(self.memory, _WANTED_AT, 0)

    def want(self, word: int) -> None:
        """Require the snapshot of this identity to reach storage before the slot is used again; 0: none."""
        _IDENTITY.pack_into(self.memory, _WANTED_AT, word)

    def describe(self, meta: SnapshotMeta) -> None:
        """Write the snapshot's metadata. Raises SnapshotUnavailableError when it does not fit."""
        raw = json.dumps(_meta_body(meta), separators=(",", ":")).encode()
        if _META_AT + _META.size + len(raw) > HEADER_BYTES:
            raise SnapshotUnavailableError(f"the description of the snapshot has {len(raw)} bytes; pass fewer metrics")
        start = _META_AT + _META.size
        self.memory[start : start + len(raw)] = raw
        _META.pack_into(self.memory, _META_AT, len(raw), zlib.crc32(raw))

    def commit(self, word: int) -> None:
        """Make the completely written snapshot count, under this identity."""
        _IDENTITY.pack_into(self.memory, _IDENTITY_AT, word)


def is_slot(header: bytes) -> bool:
    """Whether a file with this beginning is a slot of this format."""
    return len(header) == HEADER_BYTES and _HEAD.unpack_from(header) == (_MAGIC, _FORMAT, HEADER_BYTES)


class SlotDirectory(ABC, Generic[S]):
    """The snapshots of one job on one node, in a directory shared by all of its ranks and rank actors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open: dict[Path, tuple[int, S]] = {}  # by inode: a slot that becomes too small is replaced

    def slot_path(self, rank: int, index: int) -> Path:
        """Return the file of a rank's slot."""
        return self.path / f"{layout.rank_part(rank)}.{index}.snap"

    @abstractmethod
    def _slot_at(self, path: Path) -> S | None:
        """Return the slot in this file; None when there is none."""

    @abstractmethod
    def _words_at(self, path: Path) -> Words:
        """Return the page of words in this file, created if missing."""

    def slots(self, rank: int) -> list[S]:
        """Return a rank's slots."""
        found = (self._slot(self.slot_path(rank, index)) for index in range(SLOTS))
        return [slot for slot in found if slot is not None]

    def _slot(self, path: Path) -> S | None:
        try:
            inode = path.stat().st_ino
        except OSError:
            self._open.pop(path, None)
            return None
        known = self._open.get(path)
        if known is not None and known[0] == inode:
            return known[1]
        slot = self._slot_at(path)
        if slot is not None:
            self._open[path] = (inode, slot)
        return slot

    def snapshots(self, rank: int) -> list[tuple[SnapshotMeta, S]]:
        """Return a rank's valid snapshots, newest first."""
        found = [(meta, slot) for slot in self.slots(rank) if (meta := slot.meta()) is not None]
        return sorted(found, key=lambda item: item[0].version, reverse=True)

    def is_whole(self, meta: SnapshotMeta) -> bool:
        """Whether every rank that belongs to this snapshot of rank 0 has its own of the same version."""
        if not meta.gang:
            return True
        word = identity(meta.version)
        return all(any(slot.identity() == word for slot in self.slots(rank)) for rank in range(1, meta.world_size))

    def writer_lock(self, rank: int) -> WriterLock:
        """Return the lock of the process that writes a rank's slots."""
        return WriterLock(self.path / f"{layout.rank_part(rank)}.lock")

    def store_state(self, rank: int) -> StoreState:
        """Return the words by which a rank and its persister share the state of storage."""
        return StoreState(self._words_at(self.path / f"{layout.rank_part(rank)}.store"))

    @contextlib.contextmanager
    def storing(self, rank: int) -> Iterator[bool]:
        """Yield whether this process, and no other, writes the rank's state to storage until the end of the block.

        The persister writes it, and the rank before it ends: two writers of a checkpoint would damage each other's files.
        """
        lock = WriterLock(self.path / f"{layout.rank_part(rank)}.storing")
        try:
            lock.acquire()
        except SnapshotUnavailableError:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def hold(self) -> HeldVersion:
        """Return the word by which the persisters request that ranks keep a snapshot."""
        return HeldVersion(self._words_at(self.path / "hold"))


class SnapshotDirectory(SlotDirectory[SnapshotSlot]):
    """The snapshots of a job for its ranks: slots and words are mapped."""

    def _slot_at(self, path: Path) -> SnapshotSlot | None:
        return SnapshotSlot.open(path)

    def _words_at(self, path: Path) -> Words:
        return MappedWords(path)


def held(identities: list[int], word: int) -> int:
    """Return the identity that ``word`` holds: a rank's first one from there on, of the same attempt; 0 if none."""
    same_attempt = [found for found in identities if found >= word > 0 and found >> _STEP_BITS == word >> _STEP_BITS]
    return min(same_attempt, default=0)


def _meta_body(meta: SnapshotMeta) -> dict[str, Any]:
    body = {name: getattr(meta, name) for name in SnapshotMeta.__slots__ if name not in ("parts", "metrics")}
    body["metrics"] = {name: repr(value) for name, value in meta.metrics.items()}
    body["parts"] = [[part.name, part.tree_at, part.tree_bytes, part.image_at, part.image_bytes] for part in meta.parts]
    return body


def _meta_from(body: dict[str, Any], size: int) -> SnapshotMeta:
    """Parse ``_meta_body`` for a slot of ``size`` bytes. A rank's memory is untrusted and names files, so it is validated."""
    parts = tuple(
        PartRegion(name=name, tree_at=tree_at, tree_bytes=tree, image_at=image_at, image_bytes=image)
        for name, tree_at, tree, image_at, image in body.pop("parts")
    )
    for part in parts:
        regions = (part.tree_at, part.tree_bytes), (part.image_at, part.image_bytes)
        if not isinstance(part.name, str) or not _PART_NAME.fullmatch(part.name):
            raise ValueError("a part's name is invalid")
        if any(type(at) is not int or type(length) is not int for at, length in regions):
            raise TypeError("a part's place is invalid")
        if any(at < 0 or length < 0 or at + length > size for at, length in regions):
            raise ValueError("a part is outside its slot")
    metrics = {name: float(value) for name, value in body.pop("metrics").items()}
    meta = SnapshotMeta(**body, parts=parts, metrics=metrics)
    counts = (meta.attempt, meta.step, meta.rank, meta.world_size)
    if any(type(count) is not int or count < 0 for count in counts) or type(meta.created_at) not in (int, float):
        raise TypeError("a count or a time is invalid")
    if not isinstance(meta.job_id, str) or not isinstance(meta.token, str) or not _TOKEN.fullmatch(meta.token):
        raise ValueError("job_id or token is malformed")
    return meta
