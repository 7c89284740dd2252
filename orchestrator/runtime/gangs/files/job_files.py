"""Brings a job's files to its nodes and back: the working copy out, logs, exit records and outputs home.

The daemon's side of ``runtime/nodes/files.py``. Nodes that share the home need none of it but ``outputs``, which are collected
on this node then. Follows logs while a gang runs; decides nothing about the job.
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
    from orchestrator.runtime.cluster.registry import NodeRegistry
    from orchestrator.runtime.pools import Pool
    from orchestrator.runtime.ranks.logs import LogLimits
    from orchestrator.spec.paths import Paths

GOODBYE_SECONDS: Final = 10.0


class JobFiles:
    """What happens to a job's files at its start, while it runs, and at its end."""

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
        """The job's nodes that do not share the home, in the order of their ranks."""
        return self._nodes.apart(job)

    async def blind(self, directory: str, node_ids: Collection[str]) -> list[str]:
        """Which of the nodes do not see what this one writes into ``directory``. Raises OSError: this one cannot either."""
        return await self._copies.blind(directory, node_ids)

    async def ship(self, job: Job) -> None:
        """The working copy is on every node of the gang when this returns."""
        await asyncio.gather(*(self._copies.ship(job, node_id) for node_id in self.apart(job)))

    def follow(self, job: Job) -> None:
        """Mirror the logs of a running gang; asking again changes nothing."""
        self._logs.follow(job)

    async def bring_ends(self, job: Job) -> None:
        """The rest of the logs, and the exit records, of every node that can still be asked."""
        for node_id in self.apart(job):
            with contextlib.suppress(Exception):  # a node out of reach keeps them; the others are still asked
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
        """Bring home what a gang leaves behind, once no process of it is left. Returns what a person should know."""
        await self._logs.stop(job)
        await self.bring_ends(job)
        self._logs.forget(job)
        return await self._outputs.bring(job) if job.spec.outputs else ""

    async def tidy(self, live: Collection[str]) -> None:
        """Have every node forget jobs that have ended."""
        await self._nodes.keep_only(live)

    async def close(self) -> None:
        """Stop following."""
        await self._logs.close()
