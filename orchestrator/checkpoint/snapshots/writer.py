"""Copies a rank's state into shared memory: the implementation of ``context().save`` under orch.

Runs in the training process. After the first snapshot of a structure nothing is allocated or planned: the state is
walked once, and its tensors are copied to their places in the tensor file's image. The newest snapshot, and the one
that a persister writes, are never overwritten, so the copy waits for nothing.

A snapshot that is *wanted* on storage (an explicit interval, one of the best scores) is not overwritten before it has
reached it: a save waits while all slots hold such snapshots and storage works. Where storage fails, training continues
and the skipped snapshots are reported.

Everything is copied before ``save`` returns: what training changes afterwards is not in the snapshot.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory, SnapshotMeta, identity
from orchestrator.checkpoint.snapshots.slot_pool import SlotPool
from orchestrator.checkpoint.snapshots.state_layout import StateLayout

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from orchestrator.checkpoint.snapshots.top_scores import TopScores


class SnapshotWriter:
    """Writes the snapshots of one rank. Not thread-safe; the caller serialises."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        attempt: int,
        job_id: str = "",
        token: str = "",
        threads: int = 1,
        best: TopScores | None = None,
    ) -> None:
        """Copy with up to ``threads`` threads. ``best``: the saves with the best scores are wanted on storage.

        Raises SnapshotUnavailableError when shared memory cannot be used.
        """
        directory = SnapshotDirectory(path)
        self._attempt = attempt
        self._meta = functools.partial(
            SnapshotMeta, job_id=job_id, attempt=attempt, rank=rank, world_size=world_size, token=token
        )
        self._lock = directory.writer_lock(rank)
        self._lock.acquire()
        self._layout = StateLayout(threads)
        self._best = best if rank == 0 else None
        self.slots = SlotPool(directory, rank)
        """The rank's slots, with their memory and the time that a save waited for one."""
        self.copy_seconds = 0.0  # duration of the last snapshot, without planning and allocating

    def save(
        self,
        parts: Mapping[str, Any],
        *,
        step: int,
        gang: bool,
        metrics: Mapping[str, float] | None = None,
        wanted: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> int:
        """Snapshot ``parts`` (name to state) as of ``step``; return the bytes taken, 0 when this step already exists.

        ``wanted``: it must reach storage. ``on_wait`` is called when the save must first wait for storage.

        Raises SnapshotUnavailableError when shared memory is insufficient, UnsupportedStateError as the codec does.
        """
        self.slots.waited_seconds = 0.0
        word = identity(Version(attempt=self._attempt, step=step))
        if self.slots.holds(word):
            return 0
        self._layout.update(parts)
        try:
            index = self.slots.choose(on_wait)
            wanted = self._is_best(word, metrics or {}) or wanted
            return self._write(index, word, step, gang, metrics or {}, wanted)
        finally:
            self._layout.forget()

    def close(self) -> None:
        """Release the writer's lock; the snapshots stay."""
        self._layout.close()
        self._lock.release()
        self.slots.close()

    def _is_best(self, word: int, metrics: Mapping[str, float]) -> bool:
        """Whether this save is one of the best so far; the one that it replaces need not reach storage any more."""
        if self._best is None:
            return False
        member, replaced = self._best.offer(word, metrics.get(self._best.attribute))
        if member:
            self.slots.want_instead(word, replaced)
        return member

    def _write(
        self,
        index: int,
        word: int,
        step: int,
        gang: bool,  # noqa: FBT001 - a field of the page, private
        metrics: Mapping[str, float],
        wanted: bool,  # noqa: FBT001 - private
    ) -> int:
        copier = self._layout.copier(index, self.slots)
        began = time.perf_counter()
        copier.slot.begin()
        copier.slot.want(word if wanted else 0)
        copier.copy()
        regions = self._layout.regions()
        copier.slot.describe(self._meta(step=step, gang=gang, created_at=time.time(), metrics=metrics, parts=regions))
        copier.slot.commit(word)
        self.copy_seconds = time.perf_counter() - began
        return sum(region.tree_bytes + region.image_bytes for region in regions)
