"""Removes the files and records of jobs that ended long ago."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api import views as v
from orchestrator.runtime.gangs.launch_spec import checkpoint_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.port import Store


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
        kept = [_placed_by_user(await self._store.job(job_id), self._paths) for job_id in going]
        folders = [self._paths.job(job_id) for job_id in going]
        freed = await self._pool.run(lambda: sum(_size(p) for p in folders))
        if not dry_run:
            # The record goes last: after an interrupted prune the next one finds everything again.
            for folder in folders:
                await self._pool.run(shutil.rmtree, folder, True)
            going = await self._store.prune(before, needed)
        return v.PruneReply(
            removed=tuple(going),
            freed_bytes=freed,
            dry_run=dry_run,
            kept=tuple(place for place in kept if place),
        )


def _placed_by_user(job: Job, paths: Paths) -> str:
    """Return checkpoint directories that the user placed outside the home: only the user removes those."""
    configured = job.spec.checkpoint.storage_path is not None and job.checkpoints.path
    return checkpoint_dir(job, paths) if configured else ""


def _size(directory: Path) -> int:
    """Return the bytes of the files below a directory, without those that a second prune removes meanwhile."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = Path(folder, name).lstat()
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size
