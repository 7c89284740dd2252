"""Keeps Ray from handing out GPUs that are lost or quarantined."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.facts.gpus import GpuCondition
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.capacity import GpuReservations
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.nodes.agent import NodeGpu


class GpuReserving:
    """Reserves bad GPUs. ``jobs`` returns live jobs, ``conditions`` each GPU's, by UUID; ``refresh`` updates the nodes."""

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        holds: GpuReservations,
        *,
        jobs: Callable[[], Iterable[Job]],
        conditions: Callable[[], Mapping[str, GpuCondition]],
        refresh: Callable[[], Awaitable[None]],
        log: FilteringBoundLogger,
    ) -> None:
        self._ray = ray
        self._nodes = nodes
        self._holds = holds
        self._jobs = jobs
        self._conditions = conditions
        self._refresh = refresh
        self._log = log

    async def reserve(self) -> None:
        """Keep Ray from handing out any GPU that is lost or quarantined."""
        if self._ray.connected and await self._holds.keep(self.wanted()):
            self._log.warning("gpus.held", gpus=sorted(self._holds.held))
            await self._refresh()

    def wanted(self) -> dict[str, tuple[str, NodeGpu, int]]:
        """Return, by UUID, the lost or quarantined GPUs that no gang uses: node id, GPU, number of GPUs of the node."""
        conditions = self._conditions()
        used = {u for j in self._jobs() if j.gang_open for s in j.seats for u in s.gpu_uuids}
        wanted: dict[str, tuple[str, NodeGpu, int]] = {}
        for node_id, report in self._nodes.reports.items():
            lost = self._nodes.lost_gpus.get(node_id, ())
            for gpu in (*report.gpus, *lost):
                if gpu.uuid not in used and not conditions[gpu.uuid].placeable:
                    wanted[gpu.uuid] = (node_id, gpu, len(report.gpus) + len(lost))
        return wanted
