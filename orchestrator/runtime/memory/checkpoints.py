"""Checkpoints of jobs: on storage, or as a snapshot in the memory of a gang. A step is a second of the script."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint. An empty ``path`` means a snapshot in the memory of its gang."""

    attempt: int
    gang: int
    step: int
    at: float
    path: str


@dataclass(slots=True)
class Checkpoints:
    """The valid checkpoints on storage, ``stored``, by job in the order of saving, and the torn ones, ``broken``."""

    stored: dict[JobId, list[Saved]] = field(default_factory=dict)
    broken: dict[JobId, list[Saved]] = field(default_factory=dict)
    snapshots: dict[JobId, Saved] = field(default_factory=dict)

    def keep(self, job_id: JobId, saved: Saved) -> None:
        """Record a checkpoint that an attempt has saved."""
        if saved.path:
            self.stored.setdefault(job_id, []).append(saved)
        else:
            self.snapshots[job_id] = saved

    def flush(self, job_id: JobId, gang: int, at: float) -> Saved | None:
        """Write the snapshot of a gang to storage before the gang ends."""
        snapshot = self.snapshots.pop(job_id, None)
        if snapshot is None or snapshot.gang != gang:
            return None
        saved = replace(snapshot, at=at, path=path_of(job_id, snapshot.attempt, snapshot.step))
        self.keep(job_id, saved)
        return saved

    def newest(self, job_id: JobId, gang: int) -> Saved | None:
        """Return what an attempt in ``gang`` resumes from: the snapshot in its memory, or the newest on storage."""
        stored = self.stored.get(job_id, [])
        snapshot = self.snapshots.get(job_id)
        found = [*stored, snapshot] if snapshot is not None and snapshot.gang == gang else stored
        return max(found, key=lambda saved: (saved.step, saved.at), default=None)

    def resume(self, job_id: JobId, gang: int) -> int:
        """Return the step at which an attempt in ``gang`` begins."""
        newest = self.newest(job_id, gang)
        return 0 if newest is None else newest.step

    def break_newest(self, job_id: JobId) -> Saved | None:
        """Tear the newest checkpoint on storage and return it; None when there is none."""
        stored = self.stored.get(job_id)
        if not stored:
            return None
        torn = max(stored, key=lambda saved: (saved.step, saved.at))
        stored.remove(torn)
        self.broken.setdefault(job_id, []).append(torn)
        return torn


def path_of(job_id: JobId, attempt: int, step: int) -> str:
    """Return the path of a checkpoint on storage."""
    return f"/checkpoints/{job_id}/{attempt}/{step}"
