"""Answers queries about what jobs run, from their submission events and working directory archives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import RefusedError
from orchestrator.core.events import JobSubmitted
from orchestrator.daemon.jobs.specs import spec_diff, spec_view
from orchestrator.daemon.requests.left_files import left_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.api.files import FileReader
    from orchestrator.api.spec_views import SpecDiff, SpecView
    from orchestrator.core.ids import JobId
    from orchestrator.daemon.requests.left_files import LeftFiles
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.port import Store


class JobSpecs:
    """Specs and files of jobs. Archives are read in threads of ``pool``."""

    def __init__(self, store: Store, paths: Paths, pool: Pool) -> None:
        self._store = store
        self._paths = paths
        self._pool = pool

    async def spec(self, job_id: JobId) -> SpecView:
        """Return what the job runs."""
        return spec_view(await self._submission(job_id))

    async def diff(self, before: JobId, after: JobId) -> SpecDiff:
        """Return the differences of two jobs."""
        first, second = await self._submission(before), await self._submission(after)
        if first.snapshot == second.snapshot:
            return spec_diff(first, second, None)
        try:
            files = (
                await self._pool.run(self._files, first.snapshot),
                await self._pool.run(self._files, second.snapshot),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            return spec_diff(first, second, None, f"an archive cannot be read: {error}")
        return spec_diff(first, second, files)

    async def _submission(self, job_id: JobId) -> JobSubmitted:
        """Return the job's first event. Raises RefusedError where the record has none."""
        for stored in await self._store.events(job_id, after=0, limit=1):
            if isinstance(stored.event, JobSubmitted):
                return stored.event
        raise RefusedError(
            f"the record of {job_id} does not hold its submission", hint="`orch doctor` checks the record"
        )

    async def files(self, job_id: JobId) -> LeftFiles:
        """Return the job's outputs and checkpoints."""
        configured = (await self._submission(job_id)).spec.checkpoint.storage_path
        own = str(self._paths.checkpoints(job_id))
        checkpoints = own if configured is None else f"{configured.rstrip('/')}/{job_id}"
        return left_files(job_id, self._paths.outputs(job_id), checkpoints, Path, self._pool)

    def _files(self, digest: str) -> Mapping[str, str]:
        return archived_files(self._paths.blob(digest)) if digest else {}


def archived_files(manifest: Path) -> dict[str, str]:
    """Return each file and link of an archive, with its digest. Raises ValueError, KeyError for an invalid one."""
    entries: list[dict[str, Any]] = json.loads(manifest.read_bytes())["entries"]
    return {
        str(entry["path"]): f"{entry.get('mode', '')} {entry.get('digest') or entry.get('target')}"
        for entry in entries
        if entry["type"] in ("file", "link")
    }


class SpecService:
    """The part of the service for specs."""

    def __init__(self, specs: JobSpecs) -> None:
        self._specs = specs

    async def spec(self, job_id: JobId) -> SpecView:
        """Return what the job runs."""
        return await self._specs.spec(job_id)

    async def diff(self, before: JobId, after: JobId) -> SpecDiff:
        """Return the differences of two jobs."""
        return await self._specs.diff(before, after)

    async def job_files(self, job_id: JobId) -> FileReader:
        """Return the job's outputs and checkpoints."""
        return await self._specs.files(job_id)
