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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.checkpoint.errors import CheckpointError, OvertakenError, StaleAttemptError, failure_kind
from orchestrator.checkpoint.repository.pace import LOOK_SECONDS, Pace, next_pause
from orchestrator.checkpoint.repository.pending_snapshots import PendingSnapshots
from orchestrator.checkpoint.repository.persister_pages import PersisterPages
from orchestrator.checkpoint.repository.persister_record import PersisterRecord
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.repository.rounds import Rounds
from orchestrator.checkpoint.repository.snapshot_storage import SnapshotStorage
from orchestrator.checkpoint.snapshots.file import held, identity
from orchestrator.checkpoint.snapshots.unmapped import UnmappedDirectory

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from orchestrator.checkpoint.repository.status import PersisterStatus, StorageGauge
    from orchestrator.checkpoint.snapshots.file import SnapshotMeta
    from orchestrator.checkpoint.snapshots.unmapped import FileSlot
    from orchestrator.checkpoint.storage.info import CheckpointInfo
    from orchestrator.checkpoint.storage.storage import Storage

POLL_SECONDS = 0.05  # during a flush
INTERVAL_SECONDS = 5.0  # between the starts of two writes: with the write's duration, the most that a lost node costs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Storage and retention of checkpoints; the snapshots themselves hold the other settings.

    ``environ`` holds the job's own credentials for a storage behind a URL.
    """

    root: str | Storage
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pace = pace or Pace()
        self._rank, self._clock = rank, clock
        self._directory = UnmappedDirectory(snapshot_dir)
        self._pages = PersisterPages(self._directory, rank)
        self._record = PersisterRecord(self._pages, pace, clock=clock, on_persisted=on_persisted)
        self._pending = PendingSnapshots(self._directory, rank, pages=self._pages, record=self._record)
        self._storage = SnapshotStorage(lambda meta, lease: settings.repository(meta, rank=rank, lease=lease))
        self._rounds = Rounds(self._directory, self._storage, pace, clock=clock, interval_seconds=interval_seconds)
        self._lock = threading.Lock()  # one write at a time, from whichever thread
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._wrote_wanted = False

    @property
    def status(self) -> PersisterStatus:
        """Return the status of this rank's snapshots so far."""
        return self._record.status

    @property
    def gauge(self) -> StorageGauge:
        """Return the gauge of the storage that the snapshots are written to."""
        return self._storage.gauge

    def hold_lease(self, attempt: int) -> None:
        """Record that this process supervises the ranks of ``attempt``: it may store what older attempts left in memory."""
        self._storage.hold_lease(attempt)

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
                    self._record.late(self._pending.steps(), timeout_seconds)
                    return False
            time.sleep(0.0 if self._pending else POLL_SECONDS)

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._closing.wait(pause):
            busy = self.poll() and self._wrote_wanted
            self._storage.look()
            with self._lock:
                used = bool(self._directory.slots(self._rank))
            pause = next_pause(pause, busy=busy, used=used)

    # Everything below happens under the lock

    def _step(self, *, flushing: bool) -> bool:
        self._wrote_wanted = False
        try:
            hold = self._pages.open()
            if (flushing or not self._record.is_waiting()) and (found := self._pending.oldest()) is not None:
                self._wrote_wanted = self._persist(*found)
                return self._wrote_wanted
            is_due = self._rank == 0 and self._rounds.is_due()
            if not (flushing or hold.get() or is_due):
                return False  # the usual case, at every look
            mine = self._directory.snapshots(self._rank)
            if not mine:
                return False
            if self._rank == 0:
                self._rounds.coordinate(hold, mine, flushing=flushing)
            word = held([identity(meta.version) for meta, _ in mine], hold.get())
            if word in (0, self._storage.done) or (self._record.is_waiting() and not flushing):
                return False
            return self._persist(*next(found for found in mine if identity(found[0].version) == word))
        except Exception as error:  # without this thread training would wait, and checkpoints would stay in memory
            known = isinstance(error, CheckpointError | OSError)
            self._record.failed(str(error) if known else f"{type(error).__name__}: {error}", failure_kind(error))
            return False

    def _is_flushed(self) -> bool:
        if self._pending:
            return False
        whole = self._rounds.newest_whole()
        if whole is None or (self._rank != 0 and not whole.gang):
            return True
        try:
            return self._storage.holds(whole)
        except (CheckpointError, OSError):
            return False

    def _persist(self, meta: SnapshotMeta, slot: FileSlot) -> bool:
        started, word = self._clock(), identity(meta.version)
        try:
            with self._directory.storing(self._rank) as alone:
                if not alone:
                    return False  # the rank itself stores newer ones, and is about to end
                info = self._storage.write(meta, slot)
        except StaleAttemptError:
            self._storage.done = word  # a newer attempt writes elsewhere
            slot.mark_stored(word)
            return False
        except OvertakenError:
            return False
        except (CheckpointError, OSError) as error:
            self._record.failed(f"snapshot of step {meta.step} not stored: {error}", failure_kind(error))
            return False
        seconds = self._clock() - started
        self._storage.done = word
        slot.mark_stored(word)
        self._rounds.wrote(started, seconds)
        self._record.succeeded(meta, info, seconds)
        return True
