"""Removes the files and records of jobs that ended long ago."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.api import views as v
from orchestrator.core.ids import JobId
from orchestrator.daemon.jobs.tidying import keep_start_reserve
from orchestrator.daemon.submitting.under_way import REMOVED, remove_unaccepted
from orchestrator.runtime.gangs.launching import checkpoint_dir
from orchestrator.store.errors import UnreadableRecordError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.core.job.record import Job
    from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.store import Store


MEASURE_SECONDS: Final = 60.0
REMOVE_SECONDS: Final = 600.0
"""Time for one job's files, so that a tree of any size does not hold up the other jobs; the next prune continues."""


class Pruning:
    """Deletes directories of jobs that ended before a given age; ``needed`` names those that waiting jobs depend on."""

    def __init__(
        self, store: Store, paths: Paths, pool: Pool, needed: Callable[[], set[JobId]], under_way: SubmissionsUnderWay
    ) -> None:
        self._under_way = under_way
        self._store = store
        self._paths = paths
        self._pool = pool
        self._needed = needed

    async def prune(self, *, older_than_seconds: float, dry_run: bool) -> v.PruneReply:
        """Remove files and rows; see ``api.views.PruneReply``."""
        before = time.time() - older_than_seconds
        needed = frozenset(self._needed() | self._under_way.needed)
        going = await self._store.ended_before(before, needed)
        kept = dict[JobId, str]()
        for job_id in going:
            with contextlib.suppress(UnreadableRecordError):
                kept[job_id] = _placed_by_user(await self._store.job(job_id), self._paths)
        freed, left = 0, list[v.PruneLeft]()
        for job_id in going:
            folder = self._paths.job(job_id)
            if dry_run:
                freed += await self._pool.run(_size, folder)
                continue
            if job_id in self._needed() or job_id in self._under_way.needed:
                continue  # by a submission that has come meanwhile
            self._under_way.pruned.add(job_id)
            removal = await self._pool.run(_remove, folder)
            freed += removal.freed_bytes
            if removal.left:
                self._under_way.pruned.discard(job_id)
                left.append(v.PruneLeft(job_id=job_id, directory=str(folder), reason=str(removal.left)))
        if not dry_run:
            # The record goes last, and stays with its files: the next prune finds everything again.
            going = await self._store.prune(before, frozenset(set(going) - self._under_way.pruned | needed))
            self._under_way.forget_pruned()
            await self.sweep()
            await self._pool.run(keep_start_reserve, self._paths)
        return v.PruneReply(
            removed=tuple(going),
            freed_bytes=freed,
            dry_run=dry_run,
            kept=tuple(kept[job_id] for job_id in going if kept.get(job_id)),
            left=tuple(left),
        )

    async def at_start(self) -> None:
        """Remove what an ended daemon left of submissions that it had not accepted, and of jobs that it was removing."""
        known = await self._store.archives()
        await self._pool.run(remove_unaccepted, self._paths, {*known, *self._under_way.job_ids})
        await self.sweep()
        await self._pool.run(keep_start_reserve, self._paths)

    async def sweep(self) -> None:
        """Remove the blobs of archives that no job names; none while a job's record is too damaged to name its own."""
        self._under_way.begin_sweep()
        named = set((await self._store.archives()).values())
        if None not in named:
            await self._pool.run(self._under_way.sweep, named - {"", None})


def _placed_by_user(job: Job, paths: Paths) -> str:
    """Return checkpoint directories that the user placed outside the home: only the user removes those."""
    configured = job.spec.checkpoint.storage_path is not None and job.checkpoints.path
    return checkpoint_dir(job, paths) if configured else ""


def _size(directory: Path) -> int:
    """Return the bytes of the files below a directory, as far as they can be counted in time."""
    return trees.measure(directory, trees.Problems(), until=time.monotonic() + MEASURE_SECONDS).bytes


def _remove(directory: Path) -> trees.Removal:
    """Remove a job's directory. Under another name first: a report that is being written ends there, and leaves nothing."""
    doomed = directory.with_name(f"{REMOVED}{directory.name}")
    try:
        directory.rename(doomed)
    except OSError:  # none, or a full disk
        return trees.remove(directory, until=time.monotonic() + REMOVE_SECONDS)
    removal = trees.remove(doomed, until=time.monotonic() + REMOVE_SECONDS)
    if removal.left:
        doomed.rename(directory)
    return removal
