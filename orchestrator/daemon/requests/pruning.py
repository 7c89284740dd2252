"""Removes the files and records of jobs that ended long ago."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.api import views as v
from orchestrator.core.ids import JobId
from orchestrator.runtime.gangs.launch_spec import checkpoint_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.port import Store


MEASURE_SECONDS: Final = 60.0
REMOVE_SECONDS: Final = 600.0
"""Time for one job's files, so that a tree of any size does not hold up the other jobs; the next prune continues."""


class Pruning:
    """Deletes directories of jobs that ended before a given age; ``needed`` names those that waiting jobs depend on."""

    def __init__(self, store: Store, paths: Paths, pool: Pool, needed: Callable[[], set[JobId]]) -> None:
        self._store = store
        self._paths = paths
        self._pool = pool
        self._needed = needed

    async def prune(self, *, older_than_seconds: float, dry_run: bool) -> v.PruneReply:
        """Remove files and rows; see ``api.views.PruneReply``."""
        before = time.time() - older_than_seconds
        needed = frozenset(self._needed())
        going = await self._store.ended_before(before, needed)
        kept = {job_id: _placed_by_user(await self._store.job(job_id), self._paths) for job_id in going}
        freed, left = 0, list[v.PruneLeft]()
        for job_id in going:
            folder = self._paths.job(job_id)
            if dry_run:
                freed += await self._pool.run(_size, folder)
                continue
            removal = await self._pool.run(_remove, folder)
            freed += removal.freed_bytes
            if removal.left:
                left.append(v.PruneLeft(job_id=job_id, directory=str(folder), reason=str(removal.left)))
        if not dry_run:
            # The record goes last, and stays with its files: the next prune finds everything again.
            going = await self._store.prune(before, needed | {JobId(each.job_id) for each in left})
        return v.PruneReply(
            removed=tuple(going),
            freed_bytes=freed,
            dry_run=dry_run,
            kept=tuple(kept[job_id] for job_id in going if kept.get(job_id)),
            left=tuple(left),
        )


def _placed_by_user(job: Job, paths: Paths) -> str:
    """Return checkpoint directories that the user placed outside the home: only the user removes those."""
    configured = job.spec.checkpoint.storage_path is not None and job.checkpoints.path
    return checkpoint_dir(job, paths) if configured else ""


def _size(directory: Path) -> int:
    """Return the bytes of the files below a directory, as far as they can be counted in time."""
    return trees.measure(directory, trees.Problems(), until=time.monotonic() + MEASURE_SECONDS).bytes


def _remove(directory: Path) -> trees.Removal:
    return trees.remove(directory, until=time.monotonic() + REMOVE_SECONDS)
