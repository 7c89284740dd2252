"""Writes snapshots from shared memory to storage, in the background, in the process of the rank actor.

Snapshots that are wanted on storage (an explicit interval, the best scores) are written one after the other, the oldest
first, and stay in memory until then: training waits when their slots are full. Of all others the newest is written
next, at most every few seconds, and training never waits for them. Bytes are copied without torch or numpy.

Each rank actor has one. All ranks want the same versions (rank 0 publishes which scores are the best), and each
persister writes its own rank's parts. For unwanted snapshots rank 0's persister coordinates: it sets the hold word
(snapshots/file.py) to the due version, every rank keeps its first snapshot from that version on, and each persister
writes its own rank's. As ranks save the same steps, the parts belong together; should they ever differ, the checkpoint
never becomes complete, the round is abandoned after a while, and nothing wrong is stored.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping  # noqa: TC003  # msgspec reads the annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import structs

from orchestrator.checkpoint.errors import CheckpointError, OvertakenError, StaleAttemptError, failure_kind
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.snapshots.file import PartRegion, SnapshotDirectory, held, identity, version_of
from orchestrator.core.codec import Count, Message, Seconds, Text, Time

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from orchestrator.checkpoint.snapshots.file import (
        HeldVersion,
        SnapshotMeta,
        SnapshotSlot,
        StoreState,
    )
    from orchestrator.checkpoint.storage.directory import CheckpointInfo
    from orchestrator.checkpoint.storage.storage import Storage

ROOM_SECONDS: Final = 10.0
"""Seconds between two readings of the free space, while nothing is written."""


class PersisterStatus(Message):
    """Result of the writes of this rank's snapshots. ``at`` is a wall time, ``seconds`` the duration of the last write.

    ``path`` is empty until this rank's write made a checkpoint complete. ``failures`` counts all, ``failures_in_a_row``
    those since the newest success, and ``failing_since`` is the wall time of the first of these.
    """

    step: Count | None = None
    attempt: Count | None = None
    path: Text = ""
    bytes: Count = 0
    at: Time | None = None
    seconds: Seconds = 0.0
    persisted: Count = 0
    failures: Count = 0
    failure: Text = ""
    failure_kind: Text = ""  # from `errors.failure_kind`: the same for all saves that fail for the same cause
    watched: bool = False  # a checkpoint that the script wrote by itself (``external_checkpoints.py``)
    digest: Text = ""  # of its content
    failures_in_a_row: Count = 0
    failing_since: Time | None = None


class StorageGauge:
    """Duration of the current access to a storage, and free space. ``clock`` gives seconds that never go backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._asked_at: float | None = None
        self.free_bytes: int | None = None
        """Free space of the storage at the last reading; None where it is unknown."""

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current access to the storage began; 0.0 while there is none."""
        since = self._since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    @contextlib.contextmanager
    def writing(self, storage: Storage) -> Iterator[None]:
        """Measure a write; read the free space after it, whether or not it has succeeded."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._ask(storage)

    def look(self, storage: Storage) -> None:
        """Read the free space, if a reading is due."""
        if self._asked_at is None or self._clock() - self._asked_at >= ROOM_SECONDS:
            self._since = self._clock()
            self._ask(storage)

    def _ask(self, storage: Storage) -> None:
        try:
            self.free_bytes = storage.free_bytes()
        except OSError:
            self.free_bytes = None
        finally:
            self._asked_at, self._since = self._clock(), None


POLL_SECONDS = 0.05  # during a flush
LOOK_SECONDS = 0.25  # each look costs 0.1 to 0.3 ms of a core
SOON_SECONDS = 0.002  # the first look after a wanted snapshot was written; then twice as long each time
BUSY_SHARE = 0.05  # of the time, at most, is spent writing: a slow storage stretches the interval
RETRY_SECONDS = 2.0  # after a failed write
PATIENCE_SECONDS = 30.0  # until a version that some rank has not stored is abandoned for a newer one
INTERVAL_SECONDS = 5.0  # between the starts of two writes: with the write's duration, the most that a lost node costs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Storage and retention of checkpoints; the snapshots themselves hold the other settings.

    ``environ`` holds the job's own credentials for a storage behind a URL.
    """

    root: str
    keep: int | None = 3
    keep_best: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def repository(self, meta: SnapshotMeta, *, rank: int, lease: int) -> CheckpointRepository:
        """Open the repository that a snapshot of ``rank`` goes to."""
        return CheckpointRepository(
            self.root,
            attempt=meta.attempt,
            rank=rank,
            world_size=meta.world_size,
            keep=self.keep,
            keep_best=self.keep_best,
            score_attribute=self.score_attribute,
            score_order=self.score_order,
            job_id=meta.job_id,
            token=meta.token or None,
            environ=self.environ,
            lease=lease,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Share of the time that writes may take, and the seconds to wait after failures and for missing parts."""

    busy_share: float = BUSY_SHARE
    retry_seconds: float = RETRY_SECONDS
    patience_seconds: float = PATIENCE_SECONDS


_CLEARED_AGAIN = 3  # how often an older attempt's half-written checkpoint may be cleared away by the next one's ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionPart:
    """A part in a slot, as the checkpoint writer reads it."""

    slot: SnapshotSlot
    region: PartRegion

    @property
    def total_bytes(self) -> int:
        return self.region.tree_bytes + self.region.image_bytes

    def tree_file(self) -> Iterator[memoryview]:
        return self.slot.pieces(self.region.tree_at, self.region.tree_bytes)

    def tensor_file(self) -> Iterator[memoryview] | None:
        start, size = self.region.image_at, self.region.image_bytes
        return self.slot.pieces(start, size) if size else None


class PersisterPages:
    """The held version of the job, the state of storage of this rank, and the snapshots that rank 0 requires there."""

    def __init__(self, directory: SnapshotDirectory, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self._hold: HeldVersion | None = None
        self._own: StoreState | None = None
        self._leader: StoreState | None = None

    def open(self) -> HeldVersion:
        """Report to the rank that it is served; return the held version. Raises OSError."""
        if self._hold is None:
            own = self._directory.store_state(self._rank)
            self._leader = own if self._rank == 0 else self._directory.store_state(0)
            hold = self._directory.hold()
            own.serve(serving=True)
            self._own, self._hold = own, hold  # both, or the next call tries again
        return self._hold

    def close(self) -> None:
        """Report that the rank is no longer served."""
        if self._own is not None:
            self._own.serve(serving=False)
            self._own = None
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def wanted(self) -> frozenset[int]:
        """Return the identities that every rank of the gang must write to storage."""
        return frozenset() if self._leader is None else self._leader.wanted()

    def fail(self, *, failing: bool) -> None:
        """Report whether the last write to storage failed: the rank waits only while it did not."""
        if self._own is not None:
            self._own.fail(failing=failing)


Found = list[tuple["SnapshotMeta", "SnapshotSlot"]]


class SnapshotPersister:
    """Persists the snapshots of one rank.

    ``start`` does so in a background thread; ``poll`` does what is due now; ``flush`` persists the newest at once: call
    it on every rank actor when the training processes have ended, or before an actor ends.
    ``on_persisted`` is called from whichever thread completed a checkpoint. ``status`` is that of this rank's snapshots so far,
    ``gauge`` that of the storage that they are written to.
    """

    def __init__(
        self,
        snapshot_dir: str | os.PathLike[str],
        *,
        rank: int,
        settings: StoreSettings,
        interval_seconds: float = INTERVAL_SECONDS,
        on_persisted: Callable[[CheckpointInfo], None] | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._settings, self._interval = rank, settings, interval_seconds
        self._on_persisted, self._pace, self._clock = on_persisted, pace or Pace(), clock
        self._directory = SnapshotDirectory(snapshot_dir)
        self._pages = PersisterPages(self._directory, rank)
        self.status = PersisterStatus()
        self.gauge = StorageGauge()
        self._repository: CheckpointRepository | None = None
        self._repository_key: tuple[object, ...] = ()
        self._lease = 0  # the newest attempt that this process supervises ranks of
        self._done = 0  # the identity of the snapshot that was stored last
        self._retry_at = 0.0
        self._next_round_at = 0.0
        self._round_began = 0.0
        self._wrote_wanted = False
        self._lock = threading.Lock()  # one write at a time, from whichever thread
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def hold_lease(self, attempt: int) -> None:
        """Record that this process supervises the ranks of ``attempt``: it may store what older attempts left in memory."""
        self._lease = max(self._lease, attempt)

    def start(self) -> None:
        """Poll in a background thread until ``close``."""
        with self._lock, contextlib.suppress(OSError):  # the first poll tries again, and records the failure
            self._pages.open()  # a rank may save before the first poll
        self._thread = threading.Thread(target=self._run, name=f"persister-{self._rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the background thread after the write in progress. Does not flush."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            self._pages.close()

    def poll(self) -> bool:
        """Persist this rank's snapshot if one is due; return whether one was written. Storage errors appear in ``status``."""
        with self._lock:
            return self._step(flushing=False)

    def flush(self, timeout_seconds: float) -> bool:
        """Persist the newest snapshot that all of its ranks have; return whether it is in storage, or there is none.

        On ranks other than 0 this waits for rank 0's persister to choose it. Storage errors appear in ``status``.
        """
        deadline = self._clock() + timeout_seconds
        while True:
            with self._lock:
                self._step(flushing=True)
                if self._is_flushed():
                    return True
                if self._clock() >= deadline:
                    self._late(timeout_seconds)
                    return False
            time.sleep(0.0 if self._pending() else POLL_SECONDS)

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._closing.wait(pause):
            busy = self.poll() and self._wrote_wanted
            if self._repository is not None:
                self.gauge.look(self._repository.storage)
            pause = SOON_SECONDS if busy else min(2 * pause, LOOK_SECONDS)

    # Everything below happens under the lock

    def _step(self, *, flushing: bool) -> bool:
        self._wrote_wanted = False
        waiting = self._clock() < self._retry_at and not flushing  # a write has failed a moment ago
        try:
            hold = self._pages.open()
            if not waiting and (found := self._oldest_pending()) is not None:
                self._wrote_wanted = self._persist(*found)
                return self._wrote_wanted
            if not (flushing or hold.get() or (self._rank == 0 and self._clock() >= self._next_round_at)):
                return False  # the usual case, at every look
            mine = self._directory.snapshots(self._rank)
            if not mine:
                return False
            if self._rank == 0:
                self._coordinate(hold, mine, flushing=flushing)
            word = held([identity(meta.version) for meta, _ in mine], hold.get())
            if word in (0, self._done) or (self._clock() < self._retry_at and not flushing):
                return False
            return self._persist(*next(found for found in mine if identity(found[0].version) == word))
        except Exception as error:  # without this thread training would wait, and checkpoints would stay in memory
            known = isinstance(error, CheckpointError | OSError)
            self._failed(str(error) if known else f"{type(error).__name__}: {error}", failure_kind(error))
            return False

    def _is_flushed(self) -> bool:
        if self._pending():
            return False
        whole = self._newest_whole()
        if whole is None or (self._rank != 0 and not whole.gang):
            return True
        try:
            return self._holds(whole)
        except (CheckpointError, OSError):
            return False

    # -- one snapshot

    def _persist(self, meta: SnapshotMeta, slot: SnapshotSlot) -> bool:
        """Write this rank's parts of a snapshot; return whether they are in storage."""
        started, word = self._clock(), identity(meta.version)
        try:
            with self._directory.storing(self._rank) as alone:
                if not alone:
                    return False  # the rank itself stores newer ones, and is about to end
                info = self._write(meta, slot)
        except StaleAttemptError:
            self._done = word  # a newer attempt writes elsewhere
            slot.mark_stored(word)
            return False
        except OvertakenError:
            return False
        except (CheckpointError, OSError) as error:
            self._failed(f"snapshot of step {meta.step} not stored: {error}", failure_kind(error))
            return False
        seconds = self._clock() - started
        self._done = word
        slot.mark_stored(word)
        self._next_round_at = max(self._next_round_at, started + seconds / self._pace.busy_share)
        self._succeeded(meta, info, seconds)
        return True

    def _write(self, meta: SnapshotMeta, slot: SnapshotSlot) -> CheckpointInfo | None:
        """Return the checkpoint if these parts complete it. Raises CheckpointError or OSError."""
        for _ in range(_CLEARED_AGAIN if meta.attempt < self._lease else 0):
            with contextlib.suppress(FileNotFoundError):  # the next attempt's ranks remove incomplete checkpoints
                return self._write_once(meta, slot)
        return self._write_once(meta, slot)

    def _write_once(self, meta: SnapshotMeta, slot: SnapshotSlot) -> CheckpointInfo | None:
        parts = {region.name: _RegionPart(slot=slot, region=region) for region in meta.parts}
        repository = self._repository_of(meta)
        with self.gauge.writing(repository.storage):
            return repository.save_parts(
                parts, step=meta.step, gang=meta.gang, metrics=meta.metrics, still_valid=lambda: slot.holds(meta)
            )

    def _holds(self, meta: SnapshotMeta) -> bool:
        """Whether storage has this checkpoint. Raises CheckpointError or OSError."""
        if identity(meta.version) == self._done and not meta.gang:
            return True
        return meta.version.name in self._repository_of(meta).storage.names()

    def _repository_of(self, meta: SnapshotMeta) -> CheckpointRepository:
        key = (meta.attempt, meta.world_size, meta.job_id, meta.token, self._lease)
        if self._repository is None or key != self._repository_key:
            self._repository = self._settings.repository(meta, rank=self._rank, lease=self._lease)
            self._repository_key = key
        return self._repository

    # -- its result

    def _succeeded(self, meta: SnapshotMeta, info: CheckpointInfo | None, seconds: float) -> None:
        """Record a write; ``info`` is the checkpoint, if this write made it complete."""
        self._pages.fail(failing=False)
        self.status = structs.replace(
            self.status,
            step=meta.step,
            attempt=meta.attempt,
            path=self.status.path if info is None else info.path,
            bytes=sum(region.tree_bytes + region.image_bytes for region in meta.parts),
            at=time.time(),
            seconds=seconds,
            persisted=self.status.persisted + 1,
            failure="",
            failure_kind="",
            failures_in_a_row=0,
            failing_since=None,
        )
        if info is not None and self._on_persisted is not None:
            self._on_persisted(info)

    def _failed(self, message: str, kind: str) -> None:
        """Record a failure, and delay the next try."""
        self._retry_at = self._clock() + self._pace.retry_seconds
        self._pages.fail(failing=True)
        before = self.status
        self.status = structs.replace(
            before,
            failures=before.failures + 1,
            failure=message,
            failure_kind=kind,
            failures_in_a_row=before.failures_in_a_row + 1,
            failing_since=before.failing_since or time.time(),
        )

    def _late(self, seconds: float) -> None:
        """Record that the snapshots that must reach storage were not there in time."""
        found = [version_of(word) for word, _ in self._pending()]
        steps = [version.step for version in sorted(version for version in found if version is not None)]
        which = f"step {', '.join(map(str, steps))}" if steps else "the newest step"
        why = f": {self.status.failure}" if self.status.failure else ""
        self._failed(f"the snapshot of {which} was not on storage after {seconds:g} s{why}", "late")

    # -- snapshots that must reach storage: the rank marks its own, rank 0 publishes those of the best scores

    def _pending(self) -> list[tuple[int, SnapshotSlot]]:
        wanted = self._pages.wanted()
        return [(word, slot) for slot in self._directory.slots(self._rank) if (word := slot.pending(wanted))]

    def _oldest_pending(self) -> tuple[SnapshotMeta, SnapshotSlot] | None:
        """Return the oldest readable one and its slot; give up those that can never be read."""
        for word, slot in sorted(self._pending(), key=lambda item: item[0]):
            meta = slot.meta()
            if meta is not None:
                return meta, slot
            if slot.identity() == word:  # it stays unreadable
                slot.mark_stored(word)
                self._failed(f"a snapshot in {slot.path} is damaged and was given up", "damaged")
        return None

    # -- the rounds of all others, which rank 0's persister begins and ends

    def _coordinate(self, hold: HeldVersion, mine: Found, *, flushing: bool) -> None:
        """End a finished round, and begin the next one when it is due. ``mine`` are the snapshots of rank 0."""
        now = self._clock()
        word = hold.get()
        if word and not flushing:
            if now - self._round_began < self._pace.patience_seconds and not self._is_over(word, mine):
                return
            hold.set(0)
        if not flushing and now < self._next_round_at:
            return
        whole = self._newest_whole()
        if whole is None:
            return
        newest = identity(whole.version)
        if newest == word or (newest <= self._done and not flushing):
            return
        if flushing and self._holds(whole):
            return
        if any(slot.pending() == newest for slot in self._directory.slots(0)):
            return  # every rank writes a pending snapshot without a round
        hold.set(newest)
        self._round_began = now
        self._next_round_at = max(self._next_round_at, now + self._interval)

    def _newest_whole(self) -> SnapshotMeta | None:
        """Return the newest snapshot of rank 0 that every rank of its gang has too."""
        found = (meta for meta, _ in self._directory.snapshots(0) if self._directory.is_whole(meta))
        return next(found, None)

    def _is_over(self, word: int, mine: Found) -> bool:
        """Whether the held checkpoint is in storage, or can never be because ranks hold different ones."""
        chosen = held([identity(meta.version) for meta, _ in mine], word)
        meta = next((meta for meta, _ in mine if identity(meta.version) == chosen), None)
        if meta is None:
            return True
        others = range(1, meta.world_size) if meta.gang else ()
        if any(held([slot.identity() for slot in self._directory.slots(rank)], word) != chosen for rank in others):
            return True
        return self._holds(meta)
