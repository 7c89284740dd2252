"""What submissions under way write and need: removed where a submission is refused, kept from being removed until then.

A submission that is not accepted leaves nothing: neither the directories of its jobs nor the archive's blobs that it
stored. `prune` removes nothing that one needs: the jobs it waits for, resumes from or repeats, and its archive's blobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.api.errors import RefusedError
from orchestrator.durable_files import boot_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable
    from pathlib import Path

    from orchestrator.core.ids import JobId
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths


REMOVED: Final = ".removed-"
"""Before the name of a job's directory that is being removed."""


class UnderWay:
    """One submission under way. ``accepted`` is set when its jobs are in the record, or when it is unknown whether they are."""

    def __init__(self, all_of_them: SubmissionsUnderWay) -> None:
        self._all = all_of_them
        self.accepted = False
        self.job_ids: list[str] = []
        self.needed: set[JobId] = set()
        self.blobs: set[str] = set()
        self.writing = threading.Lock()
        """Held by the thread that writes files: one that a cancelled request has left ends before they are removed."""

    def blob(self, digest: str) -> Path:
        """Return the file of a blob that the submission uses: it stays until the submission ends."""
        return self._all.use(self, digest)

    def need(self, job_ids: Iterable[JobId]) -> None:
        """Keep these jobs until the submission ends. Raises RefusedError for one that is being removed."""
        for job_id in job_ids:
            if job_id in self._all.pruned:
                raise RefusedError(f"{job_id} is being removed by `orch prune`", hint="submit without it")
            self.needed.add(job_id)


class SubmissionsUnderWay:
    """Every submission under way; files are removed in threads of ``pool``. Blobs may be used from any thread."""

    def __init__(self, paths: Paths, pool: Pool) -> None:
        self._paths = paths
        self._pool = pool
        self._lock = threading.Lock()
        self._each: set[UnderWay] = set()
        self._users: Counter[str] = Counter()
        self._new: dict[str, UnderWay] = {}  # blobs that only the submission which stores them has used
        self._used_since: set[str] = set()  # blobs used since the last removal of unnamed ones began
        self.pruned: set[JobId] = set()

    @property
    def needed(self) -> set[JobId]:
        """The jobs that submissions under way need."""
        return {job_id for each in self._each for job_id in each.needed}

    @property
    def job_ids(self) -> set[str]:
        """The new jobs of submissions under way."""
        return {job_id for each in self._each for job_id in each.job_ids}

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncGenerator[UnderWay, None]:
        """Yield a new submission; where it is not accepted, what it wrote is removed when the block ends."""
        one = UnderWay(self)
        self._each.add(one)
        try:
            yield one
        finally:
            self._each.discard(one)
            if one.accepted:
                self._end(one)
            else:  # a cancelled request waits for nothing, and the removal goes on
                await asyncio.shield(self._pool.run(self._discard, one))

    def use(self, one: UnderWay, digest: str) -> Path:
        """Note that a submission uses a blob; return its file."""
        path = self._paths.blob(digest)
        with self._lock:
            if digest not in one.blobs:
                one.blobs.add(digest)
                self._users[digest] += 1
                self._used_since.add(digest)
                if self._users[digest] > 1:
                    self._new.pop(digest, None)
                elif not path.exists():
                    self._new[digest] = one
        return path

    def _end(self, one: UnderWay) -> list[str]:
        """Release the submission's blobs; return those that nothing else has ever used."""
        with self._lock:
            self._users.subtract(one.blobs)
            self._users += Counter()  # drops zeros
            new = [digest for digest in one.blobs if self._new.get(digest) is one]
            for digest in new:
                del self._new[digest]
            return new

    def _discard(self, one: UnderWay) -> None:
        with one.writing:
            for job_id in one.job_ids:
                trees.remove(self._paths.job(job_id))
        for digest in self._end(one):
            with self._lock, contextlib.suppress(OSError):
                if not self._users[digest]:
                    self._paths.blob(digest).unlink()

    def forget_pruned(self) -> None:
        """Call once the records of pruned jobs are gone: a submission that begins now cannot have found one."""
        if not self._each:
            self.pruned.clear()

    def begin_sweep(self) -> None:
        """Call before the archives that jobs name are read for ``sweep``."""
        with self._lock:
            self._used_since = set(self._users)

    def sweep(self, named: Collection[str]) -> int:
        """Remove every blob that no archive in ``named`` and no submission since ``begin_sweep`` uses; return the bytes freed."""
        kept = set(named)
        for digest in named:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a damaged one names nothing
                entries = json.loads(self._paths.blob(digest).read_bytes())["entries"]
                kept.update(entry["digest"] for entry in entries if "digest" in entry)
        freed = 0
        for path in self._paths.blobs.glob("sha256/*/*"):
            with self._lock, contextlib.suppress(OSError):
                whole = path.name.strip(".").partition(".")[0]  # of a draft, its blob's name
                if whole not in kept and whole not in self._used_since and not self._users[whole]:
                    freed += path.stat().st_size
                    path.unlink()
        return freed


def mark_accepted(paths: Paths, job_ids: Iterable[str]) -> None:
    """Note in which boot the files of accepted jobs were laid out; without the note they are laid out again before they are used."""
    for job_id in job_ids:
        with contextlib.suppress(OSError):
            paths.laid_out(job_id).write_text(boot_id(), "ascii")


def remove_unaccepted(paths: Paths, known: Collection[str]) -> list[str]:
    """Remove the directories of submissions that an ended daemon had not accepted; return their jobs' ids.

    A directory of an accepted job that the record does not know, as after a restore of a backup, is kept. What an interrupted
    `prune` had begun to remove is removed.
    """
    removed = []
    for path in paths.jobs.glob("*/"):
        doomed = path.name.startswith(REMOVED)
        if doomed or (path.name not in known and not paths.laid_out(path.name).exists()):
            trees.remove(path)
            removed.append(path.name)
    return removed
