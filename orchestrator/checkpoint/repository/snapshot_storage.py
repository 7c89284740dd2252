"""Storage of a rank's snapshots: opens the repository of each one, and copies its bytes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.repository.status import StorageGauge
from orchestrator.checkpoint.snapshots.file import PartRegion, identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from orchestrator.checkpoint.repository.repository import CheckpointRepository
    from orchestrator.checkpoint.snapshots.file import SnapshotMeta
    from orchestrator.checkpoint.snapshots.unmapped import FileSlot
    from orchestrator.checkpoint.storage.info import CheckpointInfo

_CLEARED_AGAIN = 3  # how often an older attempt's half-written checkpoint may be cleared away by the next one's ranks


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


class SnapshotStorage:
    """Stores one rank's snapshots. ``done`` is the identity stored last; ``opened`` opens a snapshot's repository, with a lease."""

    def __init__(self, opened: Callable[[SnapshotMeta, int], CheckpointRepository]) -> None:
        self.gauge = StorageGauge()
        self.done = 0
        self._opened = opened
        self._repository: CheckpointRepository | None = None
        self._key: tuple[object, ...] = ()
        self._lease = 0  # the newest attempt that this process supervises ranks of

    def hold_lease(self, attempt: int) -> None:
        """Allow this process to store snapshots that attempts before ``attempt`` left in memory."""
        self._lease = max(self._lease, attempt)

    def look(self) -> None:
        """Read the free space of the storage that was used last, if a reading is due."""
        if self._repository is not None:
            self.gauge.look(self._repository.storage)

    def holds(self, meta: SnapshotMeta) -> bool:
        """Whether storage has this checkpoint. Raises CheckpointError or OSError."""
        if identity(meta.version) == self.done and not meta.gang:
            return True
        return meta.version.name in self._repository_of(meta).storage.names()

    def write(self, meta: SnapshotMeta, slot: FileSlot) -> CheckpointInfo | None:
        """Write this rank's parts; return the checkpoint if they complete it. Raises CheckpointError or OSError."""
        parts = {region.name: _RegionPart(slot=slot, region=region) for region in meta.parts}
        for _ in range(_CLEARED_AGAIN if meta.attempt < self._lease else 0):
            with contextlib.suppress(FileNotFoundError):  # the next attempt's ranks remove incomplete checkpoints
                return self._save(meta, slot, parts)
        return self._save(meta, slot, parts)

    def _save(self, meta: SnapshotMeta, slot: FileSlot, parts: Mapping[str, _RegionPart]) -> CheckpointInfo | None:
        repository = self._repository_of(meta)
        with self.gauge.writing(repository.storage):
            return repository.save_parts(
                parts, step=meta.step, gang=meta.gang, metrics=meta.metrics, still_valid=lambda: slot.holds(meta)
            )

    def _repository_of(self, meta: SnapshotMeta) -> CheckpointRepository:
        key = (meta.attempt, meta.world_size, meta.job_id, meta.token, self._lease)
        if self._repository is None or key != self._key:
            self._repository, self._key = self._opened(meta, self._lease), key
        return self._repository
