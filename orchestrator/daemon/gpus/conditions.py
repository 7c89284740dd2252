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
    from collections.abc import Collection, Mapping

    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters


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
