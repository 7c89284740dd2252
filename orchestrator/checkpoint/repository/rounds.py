"""Rounds of unwanted snapshots: rank 0's persister chooses a version, and every rank's persister writes its own part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.checkpoint.snapshots.file import held, identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.checkpoint.repository.pace import Pace
    from orchestrator.checkpoint.repository.snapshot_storage import SnapshotStorage
    from orchestrator.checkpoint.snapshots.file import SnapshotMeta
    from orchestrator.checkpoint.snapshots.shared_words import HeldVersion
    from orchestrator.checkpoint.snapshots.unmapped import FileSlot, UnmappedDirectory

Found = list[tuple["SnapshotMeta", "FileSlot"]]


class Rounds:
    """Begins and ends the rounds, for rank 0's persister. ``clock`` gives seconds that never go backwards."""

    def __init__(
        self,
        directory: UnmappedDirectory,
        storage: SnapshotStorage,
        pace: Pace,
        *,
        clock: Callable[[], float],
        interval_seconds: float,
    ) -> None:
        self._directory, self._storage, self._pace = directory, storage, pace
        self._clock, self._interval = clock, interval_seconds
        self._not_before = 0.0
        self._since = 0.0

    def is_due(self) -> bool:
        """Whether the next round may begin."""
        return self._clock() >= self._not_before

    def wrote(self, started: float, seconds: float) -> None:
        """Delay the next round so that writes take no more than their share of the time."""
        self._not_before = max(self._not_before, started + seconds / self._pace.busy_share)

    def coordinate(self, hold: HeldVersion, mine: Found, *, flushing: bool) -> None:
        """End a finished round, and begin the next one when it is due. ``mine`` are the snapshots of rank 0."""
        now = self._clock()
        word = hold.get()
        if word and not flushing:
            if now - self._since < self._pace.patience_seconds and not self._is_over(word, mine):
                return
            hold.set(0)
        if not flushing and now < self._not_before:
            return
        whole = self.newest_whole()
        if whole is None:
            return
        newest = identity(whole.version)
        if newest == word or (newest <= self._storage.done and not flushing):
            return
        if flushing and self._storage.holds(whole):
            return
        if any(slot.pending() == newest for slot in self._directory.slots(0)):
            return  # every rank writes a pending snapshot without a round
        hold.set(newest)
        self._since = now
        self._not_before = max(self._not_before, now + self._interval)

    def newest_whole(self) -> SnapshotMeta | None:
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
        return self._storage.holds(meta)
