"""The file of a job's secrets, and the removal of what an ended job leaves outside its directory: secrets, progress pages, snapshots, lock files.

The store records with a job's end that it must be tidied, until nothing is left: the next daemon removes what a killed
one left, once it answers, secrets first. What a job left delays or fails nothing else. This module decides nothing about a
job.

Also the space and inodes kept for the start of a daemon, and of its Ray, on a full disk; the store has a reserve of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.private_files import make_private, open_private
from orchestrator.runtime.nodes.directories import node_directory, page_directory, remove_of_jobs
from orchestrator.runtime.spawn.rank_locks import remove_locks
from orchestrator.store.errors import StoreError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.ids import JobId
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.store import Store


def write_secrets(paths: Paths, job_id: str, values: Mapping[str, str]) -> None:
    """Write a job's secrets; a job without any has no file."""
    if not values:
        return
    path = paths.secrets(job_id)
    make_private(path.parent)
    handle = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(handle, json.dumps(dict(values)).encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_secrets(paths: Paths, job_id: str) -> dict[str, str]:
    """Read a job's secrets; empty when it has none, or has ended."""
    try:
        values: dict[str, str] = json.loads(paths.secrets(job_id).read_bytes())
    except FileNotFoundError:
        return {}
    return values


class Tidying:
    """Removes what ended jobs left, in threads of ``pool``. ``namespace`` names the home's directories on this machine."""

    def __init__(self, store: Store, paths: Paths, namespace: str, pool: Pool, log: FilteringBoundLogger) -> None:
        self._store = store
        self._paths = paths
        self._pages = page_directory(namespace)
        self._nodes = node_directory(namespace, "any").parent
        self._pool = pool
        self._log = log

    def drop_secrets(self, job_id: JobId) -> None:
        """Remove the job's secrets now, even while threads are busy; ``after`` tries again and reports errors."""
        self._unlink_secrets(job_id, {})

    async def once(self, ready: asyncio.Event) -> None:
        """Tidy after every ended job that was not tidied, once the daemon is ``ready``."""
        await ready.wait()
        try:
            left = await self._store.untidied()
        except StoreError as error:
            self._log.warning("jobs.untidied_not_read", error=str(error))
            return
        for job_id in left:
            await self._pool.run(self.drop_secrets, job_id)
        for job_id in left:
            await self.after([job_id])
        if left:
            self._log.info("jobs.tidied", jobs=len(left))

    async def after(self, job_ids: Collection[JobId]) -> None:
        """Remove what these jobs left. A failure is logged, and the next daemon tries again."""
        try:
            failed = await self._pool.run(self._remove, frozenset(job_ids)) if job_ids else {}
        except Exception as error:  # a job chose the files: nothing in them may end the daemon
            failed = dict.fromkeys(job_ids, f"{type(error).__name__}: {error}")
        for job_id, problem in failed.items():
            self._log.warning("job.not_tidied", job=job_id, error=problem)
        try:
            await self._store.tidied([job_id for job_id in job_ids if job_id not in failed])
        except StoreError as error:
            self._log.warning("jobs.tidied_not_written", jobs=len(job_ids), error=str(error))

    def _remove(self, job_ids: frozenset[JobId]) -> dict[str, str]:
        """Remove what these jobs left; return the error of each job for which that failed."""
        failed: dict[str, str] = {}
        for job_id in job_ids:  # of all jobs, before slower work
            self._unlink_secrets(job_id, failed)
        failed.update(remove_of_jobs(self._pages, job_ids))
        for node in _node_directories(self._nodes):
            for job_id in job_ids:
                remove_locks(node, job_id)
        return failed

    def _unlink_secrets(self, job_id: JobId, failed: dict[str, str]) -> None:
        secrets = self._paths.secrets(job_id)
        try:
            try:
                _unlink(secrets)
            except PermissionError:  # the job has closed its own directory
                trees.permit(secrets.parent)
                _unlink(secrets)
        except OSError as error:
            failed[job_id] = str(error)


def _unlink(path: Path) -> None:
    """Remove a file, if it is there, and nothing through a link in place of its directory. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.unlink(path.name, dir_fd=folder)
        finally:
            os.close(folder)


def _node_directories(nodes: Path) -> list[Path]:
    try:
        return sorted(nodes.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


START_BYTES: Final = 4 * 1024 * 1024
START_FILES: Final = 150
AMPLE_BYTES: Final = 128 * 1024 * 1024
AMPLE_FILES: Final = 1000


def keep_start_reserve(paths: Paths) -> None:
    """Reserve space and inodes for a later start on a full disk, where there are enough of both."""
    free = os.statvfs(paths.home)
    scarce = free.f_bavail * free.f_frsize < AMPLE_BYTES or (free.f_files and free.f_favail < AMPLE_FILES)
    if scarce or paths.start_reserve.exists():
        return
    paths.start_reserve.mkdir(mode=0o700)
    with (paths.start_reserve / "space").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, START_BYTES)
    for number in range(START_FILES):
        (paths.start_reserve / str(number)).touch(mode=0o600)


def release_start_reserve(paths: Paths) -> None:
    """Give up the reserve where the disk has too little for the daemon's own files, and Ray's."""
    free = os.statvfs(paths.home)
    if free.f_bavail * free.f_frsize < START_BYTES or (free.f_files and free.f_favail < START_FILES):
        trees.remove(paths.start_reserve)
