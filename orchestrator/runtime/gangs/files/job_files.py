"""Copies a job's files to its nodes and back: the working copy out; logs, exit records and outputs home.

The daemon's side of ``runtime/nodes/files.py``. For nodes that share the home only ``outputs`` are collected, on this
node. Follows logs while a gang runs; decides nothing about the job.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.gangs.files.log_mirrors import LogFollowers
from orchestrator.runtime.gangs.files.node_files import FileNodes
from orchestrator.runtime.gangs.files.outputs import OutputCollection
from orchestrator.runtime.gangs.files.working_copies import WorkingCopies
from orchestrator.runtime.nodes.files import CHUNK_BYTES
from orchestrator.runtime.nodes.working_copy import new_output

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths

GOODBYE_SECONDS: Final = 10.0


class JobFiles:
    """Handles a job's files at its start, while it runs, and at its end."""

    def __init__(
        self,
        nodes: NodeRegistry,
        paths: Paths,
        limits: LogLimits,
        *,
        outputs_max_bytes: int,
        pool: Pool,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._paths = paths
        self._nodes = FileNodes(nodes)
        self._copies = WorkingCopies(self._nodes, paths, chunk_bytes)
        self._logs = LogFollowers(self._nodes, paths, limits)
        self._outputs = OutputCollection(self._nodes, paths, pool, max_bytes=outputs_max_bytes, chunk_bytes=chunk_bytes)

    def apart(self, job: Job) -> list[str]:
        """Return the job's nodes that do not share the home, in the order of their ranks."""
        return self._nodes.apart(job)

    async def blind(self, directory: str, node_ids: Collection[str]) -> list[str]:
        """Return the nodes that cannot read this one's files in ``directory``. Raises OSError if it cannot write."""
        return await self._copies.blind(directory, node_ids)

    async def ship(self, job: Job) -> None:
        """Put the working copy on every node of the gang."""
        await asyncio.gather(*(self._copies.ship(job, node_id) for node_id in self.apart(job)))

    def follow(self, job: Job) -> None:
        """Mirror the logs of a running gang. Idempotent."""
        self._logs.follow(job)

    async def bring_ends(self, job: Job) -> None:
        """Fetch the rest of the logs, and the exit records, from every node that answers."""
        for node_id in self.apart(job):
            with contextlib.suppress(Exception):  # a node out of reach keeps them; the others are queried next
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._bring_ends_of(job, node_id)

    async def _bring_ends_of(self, job: Job, node_id: str) -> None:
        for (attempt, rank), record in (await self._nodes.ask(node_id, "exit_records", job.id)).items():
            path = self._paths.exit_record(job.id, attempt, rank)
            with new_output(self._paths.exits(job.id), path.relative_to(self._paths.exits(job.id)).as_posix()) as place:
                with place.create(0o600) as file:
                    file.write(record)
                place.finish()
        while await self._logs.fetch(job, node_id):
            pass

    async def finish(self, job: Job) -> str:
        """Copy home what a gang leaves behind, once no process of it is left. Returns notes for the user."""
        await self._logs.stop(job)
        await self.bring_ends(job)
        self._logs.forget(job)
        return await self._outputs.bring(job) if job.spec.outputs else ""

    async def tidy(self, live: Collection[str]) -> None:
        """Have every node remove the files of jobs that have ended."""
        await self._nodes.keep_only(live)

    async def close(self) -> None:
        """Stop following."""
        await self._logs.close()
