"""The snapshots of a rank that must reach storage and have not reached it yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.checkpoint.snapshots.file import version_of

if TYPE_CHECKING:
    from orchestrator.checkpoint.repository.persister_pages import PersisterPages
    from orchestrator.checkpoint.repository.persister_record import PersisterRecord
    from orchestrator.checkpoint.snapshots.file import SnapshotMeta
    from orchestrator.checkpoint.snapshots.unmapped import FileSlot, UnmappedDirectory


class PendingSnapshots:
    """Reads such snapshots from the rank's slots: the rank marks its own, rank 0 publishes those of the best scores."""

    def __init__(
        self, directory: UnmappedDirectory, rank: int, *, pages: PersisterPages, record: PersisterRecord
    ) -> None:
        self._directory, self._rank, self._pages, self._record = directory, rank, pages, record

    def __bool__(self) -> bool:
        return bool(self._found())

    def oldest(self) -> tuple[SnapshotMeta, FileSlot] | None:
        """Return the oldest readable pending snapshot and its slot; give up those that can never be read."""
        for word, slot in sorted(self._found(), key=lambda item: item[0]):
            meta = slot.meta()
            if meta is not None:
                return meta, slot
            if slot.identity() == word:  # it stays unreadable
                slot.mark_stored(word)
                self._record.failed(f"a snapshot in {slot.path} is damaged and was given up", "damaged")
        return None

    def steps(self) -> list[int]:
        """Return the steps of the pending snapshots, the oldest version's first."""
        found = [version_of(word) for word, _ in self._found()]
        return [version.step for version in sorted(version for version in found if version is not None)]

    def _found(self) -> list[tuple[int, FileSlot]]:
        wanted = self._pages.wanted()
        return [(word, slot) for slot in self._directory.slots(self._rank) if (word := slot.pending(wanted))]
