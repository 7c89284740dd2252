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
import dataclasses
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.checkpoint.errors import CheckpointError, OvertakenError, StaleAttemptError, failure_kind
from orchestrator.checkpoint.repository.pace import LOOK_SECONDS, Pace, next_pause
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.repository.status import PersisterStatus, StorageGauge
from orchestrator.checkpoint.snapshots.file import PartRegion, SnapshotMeta, held, identity, version_of
from orchestrator.checkpoint.snapshots.unmapped import FileSlot, UnmappedDirectory

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from orchestrator.checkpoint.snapshots.shared_words import HeldVersion, StoreState
    from orchestrator.checkpoint.storage.info import CheckpointInfo
    from orchestrator.checkpoint.storage.storage import Storage

POLL_SECONDS = 0.05  # during a flush
INTERVAL_SECONDS = 5.0  # between the starts of two writes: most that a lost node costs, beside the write
_CLEARED_AGAIN = 3  # how often an older attempt's half-written checkpoint may be cleared away by the next one's ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where and how checkpoints are kept; the snapshots themselves hold the other settings.

    ``environ`` holds the job's own credentials for a storage behind a URL.
    """

    root: str | Storage
    keep: int | None = 3
    keep_best: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionPart:
    """A part in a slot, as the checkpoint writer reads it."""

    slot: FileSlot
    region: PartRegion

    @property
    def total_bytes(self) -> int:
        return self.region.tree_bytes + self.region.image_bytes

    def tree_file(self) -> Iterator[memoryview]:
        return self.slot.pieces(self.region.tree_at, self.region.tree_bytes)

    def tensor_file(self) -> Iterator[memoryview] | None:
        start, size = self.region.image_at, self.region.image_bytes
        return self.slot.pieces(start, size) if size else None


@dataclass(slots=True)
class _Due:
    """Times of the monotonic clock: the next round of rank 0, the next try after a failure, and the begin of this round."""

    not_before: float = 0.0
    retry_at: float = 0.0
    round_since: float = 0.0


class SnapshotPersister:
    """Persists the snapshots of one rank.

    ``start`` does so in a background thread; ``poll`` does what is due now; ``flush`` persists the newest at once: call
    it on every rank actor when the training processes have ended, or before an actor ends.
    ``on_persisted`` is called from whichever thread completed a checkpoint.
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
    ) -> None:
        self.pace = pace or Pace()
        self._directory = UnmappedDirectory(snapshot_dir)
        self._rank, self._settings = rank, settings
        self._interval, self._on_persisted = interval_seconds, on_persisted
        self._store: CheckpointRepository | None = None
        self._store_key: tuple[object, ...] = ()
        self._hold: HeldVersion | None = None
        self._store_state: StoreState | None = None
        self._leader: StoreState | None = None
        self._lease = 0  # the newest attempt whose ranks this process supervises
        self._lock = threading.Lock()  # one write at a time, from whichever thread
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._status = PersisterStatus()
        self.gauge = StorageGauge()
        self._done = 0  # the identity that was persisted last
        self._due = _Due()
        self._wrote_wanted = False

    @property
    def status(self) -> PersisterStatus:
        """Return the status of this rank's snapshots so far."""
        return self._status

    def hold_lease(self, attempt: int) -> None:
        """Record that this process supervises the ranks of ``attempt``: it may store what older attempts left in memory."""
        self._lease = max(self._lease, attempt)

    def start(self) -> None:
        """Poll in a background thread until ``close``."""
        with self._lock, contextlib.suppress(OSError):  # the first poll tries again, and tells
            self._hold_word()  # a rank may save before the first poll
        self._thread = threading.Thread(target=self._run, name=f"persister-{self._rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the background thread after the write in progress. Does not flush."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._store_state is not None:
                self._store_state.serve(serving=False)
                self._store_state = None
            if self._hold is not None:
                self._hold.close()
                self._hold = None

    def poll(self) -> bool:
        """Persist this rank's snapshot if one is due; return whether one was written. Storage errors appear in ``status``."""
        with self._lock:
            return self._step(flushing=False)

    def flush(self, timeout_seconds: float) -> bool:
        """Persist the newest snapshot that all of its ranks have; return whether it is in storage, or there is none.

        On ranks other than 0 this waits for rank 0's persister to choose it. Storage errors appear in ``status``.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            with self._lock:
                self._step(flushing=True)
                if self._is_flushed():
                    return True
                if time.monotonic() >= deadline:
                    self._failed(self._late(timeout_seconds), "late")
                    return False
            time.sleep(0.0 if self._has_pending() else POLL_SECONDS)

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._closing.wait(pause):
            busy = self.poll() and self._wrote_wanted
            if self._store is not None:
                self.gauge.look(self._store.storage)
            with self._lock:
                used = bool(self._directory.slots(self._rank))
            pause = next_pause(pause, busy=busy, used=used)

    # Everything below happens under the lock

    def _step(self, *, flushing: bool) -> bool:
        self._wrote_wanted = False
        try:
            hold = self._hold_word()
            if (flushing or time.monotonic() >= self._due.retry_at) and (found := self._oldest_pending()) is not None:
                self._wrote_wanted = self._persist(*found)
                return self._wrote_wanted
            is_due = self._rank == 0 and time.monotonic() >= self._due.not_before
            if not (flushing or hold.get() or is_due):
                return False  # the usual case, at every look
            mine = self._directory.snapshots(self._rank)
            if not mine:
                return False
            if self._rank == 0:
                self._coordinate(hold, mine, flushing=flushing)
            word = held([identity(meta.version) for meta, _ in mine], hold.get())
            if word in (0, self._done) or (time.monotonic() < self._due.retry_at and not flushing):
                return False
            return self._persist(*next(found for found in mine if identity(found[0].version) == word))
        except Exception as error:  # without this thread training would wait, and checkpoints stay in memory
            known = isinstance(error, CheckpointError | OSError)
            self._failed(str(error) if known else f"{type(error).__name__}: {error}", failure_kind(error))
            return False

    def _oldest_pending(self) -> tuple[SnapshotMeta, FileSlot] | None:
        """Return the rank's oldest snapshot that must reach storage and has not."""
        wanted = frozenset[int]() if self._leader is None else self._leader.wanted()
        pending = [(word, slot) for slot in self._directory.slots(self._rank) if (word := slot.pending(wanted))]
        for word, slot in sorted(pending, key=lambda item: item[0]):
            meta = slot.meta()
            if meta is not None:
                return meta, slot
            if slot.identity() == word:  # it is unreadable for good
                slot.mark_stored(word)
                self._failed(f"a snapshot in {slot.path} is damaged and was given up", "damaged")
        return None

    def _has_pending(self) -> bool:
        wanted = frozenset[int]() if self._leader is None else self._leader.wanted()
        return any(slot.pending(wanted) for slot in self._directory.slots(self._rank))

    def _late(self, seconds: float) -> str:
        wanted = frozenset[int]() if self._leader is None else self._leader.wanted()
        found = [version_of(slot.pending(wanted)) for slot in self._directory.slots(self._rank)]
        steps = ", ".join(str(version.step) for version in sorted(v for v in found if v is not None))
        which = f"step {steps}" if steps else "the newest step"
        why = f": {self._status.failure}" if self._status.failure else ""
        return f"the snapshot of {which} was not on storage after {seconds:g} s{why}"

    def _coordinate(self, hold: HeldVersion, mine: list[tuple[SnapshotMeta, FileSlot]], *, flushing: bool) -> None:
        """Rank 0: end a finished round, and begin the next one when it is due."""
        now = time.monotonic()
        word = hold.get()
        if word and not flushing:
            if now - self._due.round_since < self.pace.patience_seconds and not self._is_over(word, mine):
                return
            hold.set(0)
        if not flushing and now < self._due.not_before:
            return
        whole = self._newest_whole()
        if whole is None or identity(whole.version) == word or (identity(whole.version) <= self._done and not flushing):
            return
        if flushing and self._is_stored(whole):
            return
        if any(slot.pending() == identity(whole.version) for slot in self._directory.slots(0)):
            return  # every rank writes it without being asked
        hold.set(identity(whole.version))
        self._due.round_since = now
        self._due.not_before = max(self._due.not_before, now + self._interval)

    def _is_over(self, word: int, mine: list[tuple[SnapshotMeta, FileSlot]]) -> bool:
        """Whether the held checkpoint is in storage, or can never be because ranks hold different ones."""
        chosen = held([identity(meta.version) for meta, _ in mine], word)
        meta = next((meta for meta, _ in mine if identity(meta.version) == chosen), None)
        if meta is None:
            return True
        others = range(1, meta.world_size) if meta.gang else ()
        if any(held([slot.identity() for slot in self._directory.slots(rank)], word) != chosen for rank in others):
            return True
        return self._is_stored(meta)

    def _newest_whole(self) -> SnapshotMeta | None:
        """Return the newest snapshot of rank 0 that every rank of its gang has too."""
        for meta, _ in self._directory.snapshots(0):
            if self._directory.is_whole(meta):
                return meta
        return None

    def _is_flushed(self) -> bool:
        if self._has_pending():
            return False
        whole = self._newest_whole()
        if whole is None or (self._rank != 0 and not whole.gang):
            return True
        try:
            return self._is_stored(whole)
        except (CheckpointError, OSError):
            return False

    def _is_stored(self, meta: SnapshotMeta) -> bool:
        """Whether storage has this checkpoint, or a newer attempt makes it unnecessary."""
        if identity(meta.version) == self._done and not meta.gang:
            return True
        return meta.version.name in self._store_for(meta).storage.names()

    def _persist(self, meta: SnapshotMeta, slot: FileSlot) -> bool:
        started, word = time.monotonic(), identity(meta.version)
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
        seconds = time.monotonic() - started
        self._done = word
        slot.mark_stored(word)
        if self._store_state is not None:
            self._store_state.fail(failing=False)
        self._due.not_before = max(self._due.not_before, started + seconds / self.pace.busy_share)
        self._report(meta, info, seconds)
        return True

    def _write(self, meta: SnapshotMeta, slot: FileSlot) -> CheckpointInfo | None:
        parts = {region.name: _RegionPart(slot=slot, region=region) for region in meta.parts}
        for _ in range(_CLEARED_AGAIN if meta.attempt < self._lease else 0):
            with contextlib.suppress(FileNotFoundError):  # the next attempt's ranks remove incomplete checkpoints
                return self._save(meta, slot, parts)
        return self._save(meta, slot, parts)

    def _save(self, meta: SnapshotMeta, slot: FileSlot, parts: Mapping[str, _RegionPart]) -> CheckpointInfo | None:
        store = self._store_for(meta)
        with self.gauge.writing(store.storage):
            return store.save_parts(
                parts, step=meta.step, gang=meta.gang, metrics=meta.metrics, still_valid=lambda: slot.holds(meta)
            )

    def _report(self, meta: SnapshotMeta, info: CheckpointInfo | None, seconds: float) -> None:
        self._status = dataclasses.replace(
            self._status,
            step=meta.step,
            attempt=meta.attempt,
            path=self._status.path if info is None else info.path,
            bytes=sum(region.tree_bytes + region.image_bytes for region in meta.parts),
            at=time.time(),
            seconds=seconds,
            persisted=self._status.persisted + 1,
            failure="",
            failure_kind="",
            failures_in_a_row=0,
            failing_since=None,
        )
        if info is not None and self._on_persisted is not None:
            self._on_persisted(info)

    def _failed(self, message: str, kind: str) -> None:
        self._due.retry_at = time.monotonic() + self.pace.retry_seconds
        if self._store_state is not None:
            self._store_state.fail(failing=True)
        before = self._status
        self._status = dataclasses.replace(
            before,
            failures=before.failures + 1,
            failure=message,
            failure_kind=kind,
            failures_in_a_row=before.failures_in_a_row + 1,
            failing_since=before.failing_since or time.time(),
        )

    def _store_for(self, meta: SnapshotMeta) -> CheckpointRepository:
        key = (meta.attempt, meta.world_size, meta.job_id, meta.token, self._lease)
        if self._store is None or key != self._store_key:
            settings = self._settings
            self._store = CheckpointRepository(
                settings.root,
                attempt=meta.attempt,
                rank=self._rank,
                world_size=meta.world_size,
                keep=settings.keep,
                keep_best=settings.keep_best,
                score_attribute=settings.score_attribute,
                score_order=settings.score_order,
                job_id=meta.job_id,
                token=meta.token or None,
                environ=settings.environ,
                lease=self._lease,
            )
            self._store_key = key
        return self._store

    def _hold_word(self) -> HeldVersion:
        if self._hold is None:
            self._hold = self._directory.hold()
            self._store_state = self._directory.store_state(self._rank)
            self._leader = self._store_state if self._rank == 0 else self._directory.store_state(0)
            self._store_state.serve(serving=True)
        return self._hold
