"""Computes the condition of every GPU from all sources: the node's inventory, the driver, the quarantine, the exporter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.facts.gpus import (
    GpuCondition,
    GpuFailing,
    GpuFault,
    GpuLost,
    GpuSilent,
    Quarantined,
    condition_of,
)
from orchestrator.gpu.sampler import Health

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.gpus import GpuCondition
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.capacity import GpuReservations
    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu


def gpu_conditions(
    uuids: Collection[str],
    *,
    lost: Collection[str],
    quarantined: Mapping[str, Fact],
    reports: Mapping[str, ExporterReport],
    silent: Collection[str] = (),
) -> dict[str, GpuCondition]:
    """Return the condition of each of ``uuids``: ``lost`` ones are gone from their node, ``quarantined`` has reasons.

    ``reports`` are the newest of the exporters; a GPU without one was not queried yet, unless it is one of ``silent``,
    whose exporters did not answer.
    """
    found = {}
    for uuid in uuids:
        causes: list[GpuFault] = [GpuLost(gpu_uuid=uuid)] if uuid in lost else []
        if uuid in quarantined:
            causes.append(Quarantined(gpu_uuid=uuid, cause=quarantined[uuid]))
        if uuid not in lost and uuid in reports:
            causes += driver_faults(uuid, reports[uuid])
        elif uuid not in lost and uuid in silent:
            causes.append(GpuSilent(gpu_uuid=uuid))
        found[uuid] = condition_of(uuid, tuple(causes))
    return found


def driver_faults(uuid: str, report: ExporterReport) -> list[GpuFault]:
    """Return the driver's faults in the exporter's report. An exporter that has just started has none yet."""
    match report.status.health:
        case Health.LOST:
            return [GpuLost(gpu_uuid=uuid)]
        case Health.FAILING | Health.STALE:
            return [GpuFailing(gpu_uuid=uuid, said=report.status.error or "")]
        case _:
            return []


def known_conditions(
    nodes: NodeRegistry, exporters: Exporters, quarantined: Mapping[str, Fact], *, driver: bool
) -> dict[str, GpuCondition]:
    """Return the condition of every known GPU, without new calls; with ``driver``, by the exporters' last reports."""
    lost = {gpu.uuid for gone in nodes.lost_gpus.values() for gpu in gone} | {u for _, u in exporters.missing()}
    here = {gpu.uuid for report in nodes.reports.values() for gpu in report.gpus}
    return gpu_conditions(here | lost, lost=lost, quarantined=quarantined, reports=exporters.reports if driver else {})


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
