"""Saves and loads for the context, into shared memory under orch, to storage otherwise; reports it on the progress page and in warnings."""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CheckpointError, StaleAttemptError, UnsupportedStateError, failure_kind
from orchestrator.checkpoint.format.sharded import parts_of
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory, SnapshotReader, SnapshotUnavailableError, identity
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter, TopScores, copy_threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.checkpoint.snapshots.writer import SlotPool
    from orchestrator.checkpoint.storage.directory import Checkpoint, CheckpointInfo
    from orchestrator.train.script.environment import RankEnvironment
    from orchestrator.train.script.progress import ProgressPage

_STORE_ALONE_SECONDS = 30.0  # longest wait for the rank actor, which may store the newest snapshot itself
_STORE_ALONE_POLL_SECONDS = 0.01


class CheckpointWarning(UserWarning):
    """A checkpoint could not be saved, or not in the fast way; training continues, and the next save tries again."""


class CheckpointReport:
    """Keeps the facts of one rank, by the names of ``progress_reading.CheckpointFacts``, and publishes each change."""

    def __init__(self, page: ProgressPage | None) -> None:
        self._page = page
        self._facts: dict[str, Any] = {}
        self._publishing = threading.Lock()  # a save and should_save may be called from different threads
        self._warned: set[str] = set()

    def publish(self, **changes: Any) -> None:
        """Update facts on the page."""
        with self._publishing:
            self._facts |= changes
            if self._page is not None:
                self._page.write_facts(self._facts)

    def warn(self, topic: str, message: str) -> None:
        """Warn once per topic until it succeeds again; never raises, whatever filters are set."""
        if topic in self._warned:
            return
        self._warned.add(topic)
        try:
            warnings.warn(message, CheckpointWarning, stacklevel=5)
        except CheckpointWarning:
            return  # filters that turn warnings into errors must not let a full disk end the training

    def leave(self) -> None:
        """Stop writing to the page; for a forked child, which is not the rank."""
        self._page = None

    # -- the time of a save

    def stalled(self) -> None:
        """Record that training waits for storage from now on."""
        if self._page is not None:
            self._page.write_saving()

    def returned(self, seconds: float, *, snapshot_step: int | None = None, counts: bool) -> None:
        """Record that a save has returned after ``seconds``; as ProgressPage.write_saved."""
        if self._page is not None:
            self._page.write_saved(seconds, snapshot_step=snapshot_step, counts=counts)

    # -- its result

    def snapshots_off(self, why: str) -> None:
        """Record, and warn, that there are no snapshots in shared memory."""
        self.warn("snapshot", why)
        if self._facts.get("snapshots_off", "") != why:
            self.publish(snapshots_off=why)

    def snapshots_on(self, memory_bytes: int) -> None:
        """Record that snapshots in shared memory are on, and the memory that they use."""
        self._warned.discard("snapshot")
        if self._facts.get("snapshot_bytes", 0) != memory_bytes or self._facts.get("snapshots_off"):
            self.publish(snapshot_bytes=memory_bytes, snapshots_off="")

    def backlog(self, slots: SlotPool) -> None:
        """Report that the last save waited for storage, or that storage failed and earlier ones were dropped."""
        left_out, slots.left_out = slots.left_out, []
        if not (slots.waited_seconds or left_out):
            return
        facts = self._facts
        self.publish(
            waits=facts.get("waits", 0) + bool(slots.waited_seconds),
            waited_seconds=facts.get("waited_seconds", 0.0) + slots.waited_seconds,
            left_out=facts.get("left_out", 0) + len(left_out),
            left_out_step=left_out[-1] if left_out else facts.get("left_out_step"),
        )

    def stored(self, info: CheckpointInfo) -> None:
        """Record a checkpoint that this rank has written to storage."""
        self._warned.discard("save")
        self.publish(
            saved_step=info.step,
            saved_at=time.time(),
            saved_path=info.path,
            saved_bytes=info.bytes,
            failure="",
            failure_kind="",
            failed_at=None,
        )

    def failed(self, step: int, error: Exception) -> None:
        """Record, and warn, that a save failed."""
        message = f"checkpoint of step {step} not saved: {error}"
        self.publish(
            failure=message,
            failure_kind=failure_kind(error),
            failed_at=time.time(),
            failed_saves=self._facts.get("failed_saves", 0) + 1,
        )
        self.warn("save", f"{message}; training goes on and the next save tries again")


class Saver:
    """Saves and loads for one rank. Not thread-safe; the context serialises."""

    def __init__(self, environment: RankEnvironment, page: ProgressPage | None) -> None:
        self._environment = environment
        self.report = CheckpointReport(page)
        self.stall_seconds = 0.0  # of the last save
        self.cost_seconds = 0.0  # of a save like the last one, without allocation
        self._store: CheckpointRepository | None = None
        self._writer: SnapshotWriter | None = None

    def save(
        self,
        state: Any,
        *,
        step: int,
        rank_state: Any,
        metrics: Mapping[str, float],
        durable: bool = False,
        leaving: bool = False,
    ) -> bool:
        """Save a state, as Context.save describes. ``durable``: this save must reach storage, not just a newer one.

        ``leaving``: it is on storage before this returns, whatever happens to the rank actor.
        """
        clock = time.perf_counter()
        parts, gang = parts_of(state, rank_state, self._environment.rank)
        if not parts:
            return True
        try:
            # To storage first: a snapshot may wait for a rank actor that has already ended.
            stored = leaving and self._store_alone(parts, step, metrics, gang=gang)
            if self._snapshot(parts, step, metrics, gang=gang, durable=durable and not stored):
                return True
            return stored or self._store_now(parts, step, metrics, gang=gang)
        finally:
            self.stall_seconds = time.perf_counter() - clock

    def load(self, into: Any = None) -> Checkpoint | None:
        """Load the newest valid checkpoint, as Context.load describes."""
        clock = time.perf_counter()
        store = self._checkpoints()
        try:
            loaded = store.load_latest(into)
        finally:
            self.report.publish(quarantined=store.quarantined)
        if loaded is None and self._environment.resume_from is not None:
            loaded = store.load_path(self._environment.resume_from, into)
        if loaded is not None:
            self.report.publish(
                resumed_step=loaded.step, resumed_path=loaded.path, resumed_seconds=time.perf_counter() - clock
            )
        return loaded

    def leave(self) -> None:
        """Stop reporting; for a forked child, which is not the rank."""
        self.report.leave()

    def _snapshot(
        self,
        parts: Mapping[str, Any],
        step: int,
        metrics: Mapping[str, float],
        *,
        gang: bool,
        durable: bool,
    ) -> bool:
        """Save into shared memory, for the rank actor to store; False when that is not possible."""
        here = self._environment
        if here.snapshot_dir is None or (gang and not here.on_one_node):
            return False  # ranks of several nodes share only storage
        clock = time.perf_counter()
        try:
            writer = self._snapshots(here.snapshot_dir)
            if writer.save(
                parts,
                step=step,
                gang=gang,
                metrics=metrics,
                wanted=durable,
                on_wait=self.report.stalled,
            ):
                self.cost_seconds = writer.copy_seconds
        except SnapshotUnavailableError as error:
            self.report.snapshots_off(f"{error}; checkpoints go to storage directly, which takes longer")
            return False
        self.report.snapshots_on(writer.slots.memory_bytes)
        self.report.backlog(writer.slots)
        self.report.returned(time.perf_counter() - clock, snapshot_step=step, counts=True)
        return True

    def _best(self) -> TopScores | None:
        """Return the scores of the best saves, beginning with those on storage; None where there is no score."""
        attribute, count = self._environment.score_attribute, self._checkpoints().retention.best_count
        if attribute is None or count is None or self._environment.rank != 0:
            return None
        best = TopScores(attribute, order=self._environment.score_order, keep=count)
        try:
            infos = self._checkpoints().list()
        except OSError as error:
            self.report.warn("best", f"scores of earlier checkpoints are unknown: {error}")
            return best
        best.learn((identity(info.version), info.metrics.get(attribute)) for info in infos if info.is_complete)
        return best

    def _store_now(self, parts: Mapping[str, Any], step: int, metrics: Mapping[str, float], *, gang: bool) -> bool:
        """Save to storage while training waits; return whether that succeeded."""
        clock, done = time.perf_counter(), False
        self.report.stalled()
        try:
            info = self._checkpoints().save_states(parts, step=step, gang=gang, metrics=metrics)
            done = True
        except (StaleAttemptError, UnsupportedStateError):
            raise
        except (CheckpointError, OSError) as error:
            self.report.failed(step, error)
            return False
        finally:
            self.cost_seconds = time.perf_counter() - clock
            self.report.returned(self.cost_seconds, counts=done)
        if info is not None:
            self.report.stored(info)
        return True

    def _store_alone(self, parts: Mapping[str, Any], step: int, metrics: Mapping[str, float], *, gang: bool) -> bool:
        """Save to storage once a write in progress of the rank actor has ended; return whether that succeeded."""
        if self._environment.snapshot_dir is None:
            return self._store_now(parts, step, metrics, gang=gang)
        directory = SnapshotDirectory(self._environment.snapshot_dir)
        deadline = time.monotonic() + _STORE_ALONE_SECONDS
        while time.monotonic() < deadline:
            with directory.storing(self._environment.rank) as alone:
                if alone:
                    return self._store_now(parts, step, metrics, gang=gang)
            time.sleep(_STORE_ALONE_POLL_SECONDS)
        return False

    def _snapshots(self, path: str) -> SnapshotWriter:
        if self._writer is None:
            here = self._environment
            self._writer = SnapshotWriter(
                path,
                rank=here.rank,
                world_size=here.world_size,
                attempt=self._checkpoints().attempt if here.attempt is None else here.attempt,
                job_id=here.job_id,
                token=here.token or "",
                threads=copy_threads(here.local_world_size),
                best=self._best(),
            )
        return self._writer

    def _checkpoints(self) -> CheckpointRepository:
        if self._store is None:
            here = self._environment
            snapshots = None
            if here.snapshot_dir is not None and here.on_one_node:
                snapshots = SnapshotReader(here.snapshot_dir, job_id=here.job_id)
            self._store = CheckpointRepository(
                here.checkpoint_dir,
                attempt=here.attempt,
                rank=here.rank,
                world_size=here.world_size,
                keep=here.keep,
                keep_best=here.keep_best,
                score_attribute=here.score_attribute,
                score_order=here.score_order,
                job_id=here.job_id,
                token=here.token,
                snapshots=snapshots,
            )
        return self._store
