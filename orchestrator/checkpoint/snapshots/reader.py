"""Loads snapshots that a dead process left in shared memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import codec, layout, tensorfile
from orchestrator.checkpoint.format.sharded import join, pieces_of
from orchestrator.checkpoint.snapshots.file import SnapshotDirectory, SnapshotMeta, SnapshotSlot
from orchestrator.checkpoint.storage.directory import Checkpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from orchestrator.checkpoint.format.layout import Version

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
