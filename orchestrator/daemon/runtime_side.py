"""The runtime in the daemon's life cycle: connected, prepared for jobs, disconnected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from orchestrator.core.job.record import Job
    from orchestrator.daemon.nodes.care import NodeCare
    from orchestrator.daemon.nodes.warming import ForkServers
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.gangs.gangs import Gangs


class RuntimeSide:
    """Starts and stops what runs on nodes. ``jobs`` are the live ones."""

    def __init__(
        self,
        cluster: Cluster,
        gangs: Gangs,
        exporters: Exporters,
        nodes: NodeCare,
        fork_servers: ForkServers,
        jobs: Callable[[], Collection[Job]],
    ) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._gangs = gangs
        self._exporters = exporters
        self._nodes = nodes
        self._fork_servers = fork_servers

    @property
    def address(self) -> str:
        """Return the cluster's address."""
        return self._cluster.address

    async def connect(self) -> None:
        """Find or start the cluster; its nodes are known, and gangs of no live job ended, on return. Raises ClusterError."""
        await self._cluster.start()
        await self._nodes.refresh()
        await self._gangs.survey(self._jobs())

    async def prepare(self) -> None:
        """Prepare the machine of an embedded cluster for its first job; on a shared cluster, do nothing."""
        if self._cluster.site.embedded:
            await self._fork_servers.warm()

    async def settle(self) -> None:
        """Start the exporters, then as many idle workers as they took for the first job."""
        await self._exporters.refresh()
        await self._cluster.warm()

    async def abandon(self) -> None:
        """End what a failed start has begun."""
        await self._gangs.close()
        await self._cluster.abandon()

    async def detach(self) -> None:
        """Stop watching gangs; they continue to run."""
        await self._gangs.close()

    async def stop(self, *, stop_head: bool) -> None:
        """Disconnect from the cluster."""
        await self._cluster.stop(stop_head=stop_head)
