"""A table of every GPU of every node for users: values, condition, holders."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from orchestrator.core.facts.gpus import GpuState
from orchestrator.daemon.gpus.conditions import gpu_conditions
from orchestrator.gpu.row import GpuOwner, GpuRow, gpu_row
from orchestrator.gpu.sampler import Health

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.gpus import GpuCondition
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.actor import ExporterReport
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu


class GpuTable:
    """Queries the exporters of all GPUs on request. ``jobs`` returns the live jobs, ``clock`` seconds."""

    def __init__(
        self,
        nodes: NodeRegistry,
        exporters: Exporters,
        jobs: Callable[[], Collection[Job]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = nodes
        self._exporters = exporters
        self._jobs = jobs
        self._clock = clock
        self._asked_at = -inf

    async def _reports(self, max_age_seconds: float) -> Mapping[str, ExporterReport]:
        """Return the exporters' last reports; those of GPUs that jobs hold are newer."""
        if self._clock() - self._asked_at < max_age_seconds:
            return dict(self._exporters.reports)
        self._asked_at = self._clock()
        return await self._exporters.ask()

    async def rows(self, quarantined: Mapping[str, Fact], max_age_seconds: float = 0.0) -> list[GpuRow]:
        """Return a row for each GPU, by node and index; ``quarantined`` has reasons by UUID.

        Exporters are queried where their last report is older than ``max_age_seconds``.
        """
        reports = await self._reports(max_age_seconds)
        holders: dict[str, list[GpuOwner]] = {}
        for job in self._jobs():
            for seat in job.seats if job.gang_open else ():
                for uuid in seat.gpu_uuids:
                    holders.setdefault(uuid, []).append(GpuOwner(job_id=job.id, rank=seat.rank))
        here = [(gpu, node) for node in self._nodes.reports.values() for gpu in node.gpus]
        gone = [(gpu, self._nodes.reports[i]) for i, lost in self._nodes.lost_gpus.items() for gpu in lost]
        conditions = gpu_conditions(
            [gpu.uuid for gpu, _ in (*here, *gone)],
            lost={gpu.uuid for gpu, _ in gone},
            quarantined=quarantined,
            reports=reports,
            silent={gpu.uuid for gpu, _ in here if not self._exporters.is_starting(gpu.uuid)} - reports.keys(),
        )
        rows = [
            _row(gpu, node.hostname, reports.get(gpu.uuid), conditions[gpu.uuid], holders.get(gpu.uuid, ()))
            for gpu, node in (*here, *gone)
        ]
        return sorted(rows, key=lambda row: (row.node, row.index, row.gpu_uuid))


def _row(
    gpu: NodeGpu, node: str, report: ExporterReport | None, condition: GpuCondition, holders: Sequence[GpuOwner]
) -> GpuRow:
    lost, cause = condition.state is GpuState.LOST, None if condition.cause is None else condition.cause.sentence()
    if report is None or lost:
        row = GpuRow(
            gpu_uuid=gpu.uuid,
            node=node,
            index=gpu.index,
            vendor="simulated" if gpu.simulated else "",
            model=gpu.model,
            simulated=gpu.simulated,
            health=Health.LOST if lost else Health.STARTING if condition.healthy else Health.FAILING,
            problem=cause,
            job_id=holders[0].job_id if holders else None,
            rank=holders[0].rank if holders else None,
            holders=tuple(holders),
        )
    else:
        status, problem = report.status, cause or report.status.error
        row = gpu_row(status.info, node, status.sample, health=status.health, problem=problem, holders=tuple(holders))
    causes = tuple(each.to_dict() for each in condition.causes)
    return replace(row, condition=condition.state.value, causes=causes)
