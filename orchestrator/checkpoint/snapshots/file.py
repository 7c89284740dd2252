"""Files in shared memory that hold a rank's snapshots: format, opening, torn and complete ones, and the loading of those that a dead process left.

Each rank has up to three slots ``rank-00000.0.snap`` ... in the job's snapshot directory. A slot holds for each part of
the state its JSON text and the image of its tensor file, byte for byte as on storage: persisting a snapshot copies
memory to a file and needs no knowledge of tensors.

A slot's *identity* (attempt and step in one 64-bit word) is zero during a write and is set last. A process killed in
the middle leaves zero; a reader checks that the identity is the same before and after reading.

Only the process that writes a slot maps it. All others, and all readers of the pages of words that ranks share with their
persisters, use system calls, because a rank can truncate a file at any moment: reading a map of it would kill the reader
(SIGBUS), a short read is an ordinary error.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import mmap
import os
import struct
import weakref
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
from msgspec import Meta

from orchestrator import units
from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import codec, layout, tensorfile
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.format.sharded import join, pieces_of
from orchestrator.checkpoint.storage.directory import Checkpoint
from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

HEADER_BYTES = 16 * 1024
SLOTS = 3  # the newest, the one being written, and one that is being persisted
MAX_OF_AVAILABLE = 0.9  # the rest is for allocations of other processes
PIECE_BYTES = 256 * 1024  # fits a core's cache while it is hashed and written
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
_MAGIC = b"ORCHSNAP"
_FORMAT = 1
_HEAD = struct.Struct("<8sII")
_WORD = struct.Struct("<Q")
_IDENTITY_AT = 64  # on its own cache line
_WANTED_AT = 72  # the identity of a snapshot that must reach storage
_STORED_AT = 80  # the identity of the snapshot that has reached it, or never will
_META = struct.Struct("<II")  # length and CRC-32 of the msgpack that follows
_META_AT = 128
PartName = Annotated[str, Meta(pattern=r"\A(?:state|(?:rank|shard)-[0-9]{5,10})\Z")]
Token = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{0,128}\Z")]
_STEP_BITS = 40
_MAX_STEP = 2**_STEP_BITS - 1
_MAX_ATTEMPT = 2**23


class SnapshotUnavailableError(Exception):
    """Shared memory cannot be used for this snapshot; it is saved to storage directly instead."""


class PartRegion(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The position of one part in its slot: JSON text and tensor file image, each as offset and length in bytes."""

    name: PartName
    tree_at: layout.Count
    tree_bytes: layout.Count
    image_at: layout.Count
    image_bytes: layout.Count


class SnapshotMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attempt, step and parts of a snapshot. ``gang``: every rank has one of the same step, and they only count together."""

    job_id: str
    attempt: layout.Count
    step: layout.Count
    rank: layout.Count
    world_size: layout.Count
    token: Token
    gang: bool
    created_at: layout.Time
    metrics: dict[str, float] = {}
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


class SnapshotSlot:
    """One slot. Its file stays open while anything refers to it.

    Everything but ``memory`` reads and writes the file by system calls.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle
        weakref.finalize(self, os.close, handle)

    @classmethod
    def create(cls, path: Path, size: int) -> Self:
        """Create a blank slot of ``size`` bytes in place of any existing one.

        Its pages are reserved at once, so that missing shared memory is an error here, not a SIGBUS later. The
        reservation also leaves the memory that the machine's processes need: the kernel would otherwise kill one of
        them.
        """
        left = available_memory_bytes()
        if left is not None and size > left * MAX_OF_AVAILABLE:
            raise SnapshotUnavailableError(
                f"no room for a snapshot of {units.size(size)}: {units.size(left)} of memory are left on this machine"
            )
        draft = path.with_suffix(".new")
        handle = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        slot = cls(path, handle)
        try:
            os.posix_fallocate(handle, 0, size)
            slot.memory = mmap.mmap(handle, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            draft.unlink()
            raise SnapshotUnavailableError(
                f"{path.parent}: no room for a snapshot of {units.size(size)}: {error}"
            ) from error
        os.pwrite(handle, _HEAD.pack(_MAGIC, _FORMAT, HEADER_BYTES), 0)
        draft.replace(path)
        return slot

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open an existing slot; None when there is none or it has another format."""
        try:
            slot = cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
            header = slot.header()
        except OSError:
            return None
        is_slot = len(header) == HEADER_BYTES and _HEAD.unpack_from(header) == (_MAGIC, _FORMAT, HEADER_BYTES)
        return slot if is_slot else None

    @functools.cached_property
    def memory(self) -> mmap.mmap:
        """The mapped slot, only for the process that writes it: reading the map of a truncated file kills the reader."""
        return mmap.mmap(self._handle, self.size)

    @property
    def size(self) -> int:
        """Return the file's present size in bytes."""
        return os.fstat(self._handle).st_size

    def word(self, at: int) -> int:
        """Return the word at this offset; 0 where the file ends before it."""
        return int(_WORD.unpack(os.pread(self._handle, _WORD.size, at).ljust(_WORD.size, b"\0"))[0])

    def put_word(self, at: int, word: int) -> None:
        """Write a word."""
        os.pwrite(self._handle, _WORD.pack(word), at)

    def header(self) -> bytes:
        """Return the first ``HEADER_BYTES``, or fewer in a shorter file."""
        return os.pread(self._handle, HEADER_BYTES, 0)

    def read(self, start: int, size: int) -> memoryview:
        """Return a writable copy of these bytes. Raises CorruptCheckpointError when the file ends before."""
        content, at = memoryview(bytearray(size)), 0
        while at < size:
            at += self._read_into(content[at:], start + at)
        return content

    def pieces(self, start: int, size: int) -> Iterator[memoryview]:
        """Yield these bytes, piece by piece, reusing one buffer. Raises CorruptCheckpointError when the file ends before."""
        buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
        end = start + size
        while start < end:
            count = self._read_into(buffer[: end - start], start)
            yield buffer[:count]
            start += count

    def _read_into(self, buffer: memoryview, start: int) -> int:
        count = os.preadv(self._handle, [buffer], start)
        if count == 0:
            raise CorruptCheckpointError(f"{self.path} was cut short while it was read")
        return count

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
        """Return the snapshot's metadata; None when it does not count or changed while it was read.

        A rank's memory is untrusted, and names files: what no ``describe`` writes does not count.
        """
        before = self.identity()
        header = self.header() if before else b""
        if len(header) != HEADER_BYTES:
            return None
        length, crc = _META.unpack_from(header, _META_AT)
        raw = header[_META_AT + _META.size :][:length]
        if zlib.crc32(raw) != crc or self.identity() != before:
            return None
        try:
            meta = msgspec.msgpack.decode(raw, type=SnapshotMeta)
            is_same = identity(meta.version) == before
        except (ValueError, SnapshotUnavailableError):
            return None
        ends = [
            end for part in meta.parts for end in (part.tree_at + part.tree_bytes, part.image_at + part.image_bytes)
        ]
        return meta if is_same and max(ends, default=0) <= self.size else None

    def holds(self, meta: SnapshotMeta) -> bool:
        """Whether this is still the snapshot that ``meta`` describes."""
        return self.identity() == identity(meta.version)

    def begin(self) -> None:
        """Invalidate the slot's content."""
        self.put_word(_IDENTITY_AT, 0)
        self.put_word(_WANTED_AT, 0)

    def want(self, word: int) -> None:
        """Require the snapshot of this identity to reach storage before the slot is used again; 0: none."""
        self.put_word(_WANTED_AT, word)

    def describe(self, meta: SnapshotMeta) -> None:
        """Write the snapshot's metadata. Raises SnapshotUnavailableError when it does not fit."""
        try:
            raw = msgspec.msgpack.encode(meta)
        except UnicodeEncodeError as error:
            raise SnapshotUnavailableError("a metric's name has characters that UTF-8 cannot hold") from error
        if _META_AT + _META.size + len(raw) > HEADER_BYTES:
            raise SnapshotUnavailableError(f"the description of the snapshot has {len(raw)} bytes; pass fewer metrics")
        os.pwrite(self._handle, _META.pack(len(raw), zlib.crc32(raw)) + raw, _META_AT)

    def commit(self, word: int) -> None:
        """Make the completely written snapshot count, under this identity."""
        self.put_word(_IDENTITY_AT, word)


class SnapshotDirectory:
    """The snapshots of one job on one node, in a directory shared by all of its ranks and rank actors."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open: dict[Path, tuple[int, SnapshotSlot]] = {}  # by inode: a slot that becomes too small is replaced

    def slot_path(self, rank: int, index: int) -> Path:
        """Return the file of a rank's slot."""
        return self.path / f"{layout.rank_part(rank)}.{index}.snap"

    def slots(self, rank: int) -> list[SnapshotSlot]:
        """Return a rank's slots."""
        found = (self._slot(self.slot_path(rank, index)) for index in range(SLOTS))
        return [slot for slot in found if slot is not None]

    def _slot(self, path: Path) -> SnapshotSlot | None:
        try:
            inode = path.stat().st_ino
        except OSError:
            self._open.pop(path, None)
            return None
        known = self._open.get(path)
        if known is not None and known[0] == inode:
            return known[1]
        slot = SnapshotSlot.open(path)
        if slot is not None:
            self._open[path] = (inode, slot)
        return slot

    def snapshots(self, rank: int) -> list[tuple[SnapshotMeta, SnapshotSlot]]:
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
        return StoreState(self.path / f"{layout.rank_part(rank)}.store")

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
        return HeldVersion(self.path / "hold")


def held(identities: list[int], word: int) -> int:
    """Return the identity that ``word`` holds: a rank's first one from there on, of the same attempt; 0 if none."""
    same_attempt = [found for found in identities if found >= word > 0 and found >> _STEP_BITS == word >> _STEP_BITS]
    return min(same_attempt, default=0)


def available_memory_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int | None:
    """Return the memory that new pages may take on this machine and in this process's control group; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = meminfo.read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError, LookupError):
        group = cgroups / Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Page cache is freed on demand; pages of shared memory are not.
        found.append(limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    with contextlib.suppress(OSError, ValueError, LookupError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        path = next(line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(","))
        group = cgroups / "memory" / path.lstrip("/")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.usage_in_bytes").read_text())
        files = int(stat["total_active_file"]) + int(stat["total_inactive_file"])
        found.append(int(stat["hierarchical_memory_limit"]) - used + files)
    return min(found, default=None)


class WriterLock:
    """Held for its lifetime by the process that writes a rank's slots.

    A POSIX record lock: the kernel frees it with the process, and forked children do not inherit it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock. Raises SnapshotUnavailableError when another live process has it, or its file cannot be created."""
        try:
            make_private(self._path.parent)
            handle = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotUnavailableError(f"{self._path.parent} cannot be used for snapshots: {error}") from error
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise SnapshotUnavailableError(f"another live process writes the snapshots of {self._path.stem}") from error
        self._handle = handle

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Words:
    """A page of 64-bit words, created if missing. Each access is a system call, which is safe for a file of any length."""

    def __init__(self, path: Path) -> None:
        make_private(path.parent)
        self._handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._handle)
        os.posix_fallocate(self._handle, 0, mmap.PAGESIZE)

    def words(self, first: int, count: int) -> Sequence[int]:
        """Return several words; 0 for those beyond the end of the file."""
        raw = os.pread(self._handle, count * _WORD.size, first * _WORD.size)
        return struct.unpack(f"<{count}Q", raw.ljust(count * _WORD.size, b"\0"))

    def put(self, index: int, word: int) -> None:
        """Write one word."""
        os.pwrite(self._handle, _WORD.pack(word), index * _WORD.size)

    def close(self) -> None:
        """Close the page; it cannot be used afterwards."""
        self._close()


class HeldVersion(Words):
    """A word that all ranks and rank actors of a node share.

    It holds an identity: every rank keeps its first snapshot from that version on until the word changes. So the
    persisters of all ranks find snapshots of the same step, although no rank waits for another.
    """

    def get(self) -> int:
        """Return the held identity, 0 for none."""
        return self.words(0, 1)[0]

    def set(self, word: int) -> None:
        """Hold another identity; 0 releases it."""
        self.put(0, word)


class StoreState(Words):
    """Words by which a rank's persister informs the rank, and rank 0 the persisters of all ranks.

    A rank waits for storage only while its persister reports that it writes all wanted snapshots and that storage works.
    """

    _SERVED, _FAILING, _WANTED, _WANTED_WORDS = 0, 1, 8, 64

    @property
    def takes_all(self) -> bool:
        """Whether a persister stores every wanted snapshot, and its last write did not fail."""
        return self.serves and self.words(self._FAILING, 1)[0] == 0

    @property
    def serves(self) -> bool:
        """Whether a persister handles this rank's snapshots."""
        return self.words(self._SERVED, 1)[0] == 1

    def serve(self, *, serving: bool) -> None:
        """Record whether a persister handles this rank's snapshots."""
        self.put(self._SERVED, int(serving))

    def fail(self, *, failing: bool) -> None:
        """Record whether the last write to storage failed."""
        self.put(self._FAILING, int(failing))

    def wanted(self) -> frozenset[int]:
        """Return the identities that this rank, rank 0 of a gang, requires on storage; the newest 64."""
        return frozenset(self.words(self._WANTED, self._WANTED_WORDS)) - {0}

    def publish_wanted(self, words: Iterable[int]) -> None:
        """Publish the identities that every rank of the gang must write to storage."""
        newest = sorted(words)[-self._WANTED_WORDS :]
        for index in range(self._WANTED_WORDS):
            self.put(self._WANTED + index, newest[index] if index < len(newest) else 0)


MEMORY = "memory"  # the path of a checkpoint that is not on storage


class SnapshotReader:
    """Reads the snapshots of one job on this node, as a source of checkpoints."""

    def __init__(self, path: str | os.PathLike[str], *, job_id: str) -> None:
        self._directory = SnapshotDirectory(path)
        self.path = self._directory.path
        self._job_id = job_id

    def newest(self) -> Version | None:
        """Return the version of the newest snapshot that every rank with a part in it has; None when there is none."""
        for meta, _ in self._directory.snapshots(0):
            if meta.job_id == self._job_id and self._directory.is_whole(meta):
                return meta.version
        return None

    def load(self, version: Version, rank: int, world_size: int, into: Any = None) -> Checkpoint:
        """Copy a snapshot out of shared memory, for ``rank`` of ``world_size``.

        Raises CorruptCheckpointError when it is missing, or was overwritten meanwhile.
        """
        meta, slot = self._find(0, version)
        has_part = meta.gang and world_size == meta.world_size
        return Checkpoint(
            state=join(_read(slot, meta, layout.STATE), lambda: self._pieces(meta), into),
            rank_state=self._rank_part(rank, version) if has_part else None,
            step=meta.step,
            attempt=meta.attempt,
            metrics=meta.metrics,
            path=MEMORY,
            world_size=meta.world_size,
            bytes=sum(part.tree_bytes + part.image_bytes for part in meta.parts),
            read_rank_state=lambda other: (
                self._rank_part(other, version) if meta.gang and 0 <= other < meta.world_size else None
            ),
        )

    def _find(self, rank: int, version: Version) -> tuple[SnapshotMeta, SnapshotSlot]:
        for meta, slot in self._directory.snapshots(rank):
            if meta.version == version and meta.job_id == self._job_id:
                return meta, slot
        raise CorruptCheckpointError(f"the snapshot of step {version.step} is not in rank {rank}'s memory any more")

    def _rank_part(self, rank: int, version: Version) -> Any:
        meta, slot = self._find(rank, version)
        part = layout.rank_part(rank)
        return _read(slot, meta, part) if any(region.name == part for region in meta.parts) else None

    def _pieces(self, whole: SnapshotMeta) -> Iterator[Mapping[str, Any]]:
        for rank in range(whole.world_size):
            meta, slot = self._find(rank, whole.version)
            yield from pieces_of(_read(slot, meta, layout.shard_part(rank)))


def _read(slot: SnapshotSlot, meta: SnapshotMeta, name: str) -> Any:
    region = next((part for part in meta.parts if part.name == name), None)
    if region is None:
        raise CorruptCheckpointError(f"the snapshot of step {meta.step} has no part {name!r}")
    tree = slot.read(region.tree_at, region.tree_bytes)
    image = slot.read(region.image_at, region.image_bytes)
    if not slot.holds(meta):
        raise CorruptCheckpointError(f"the snapshot of step {meta.step} was overwritten while it was read")
    try:
        node = json.loads(bytes(tree))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the snapshot of step {meta.step} is damaged: {error}") from error
    if region.image_bytes == 0:
        return codec.decode(node, (), memoryview(b""))
    entries, data = tensorfile.parse(image)
    return codec.decode(node, entries, data)
