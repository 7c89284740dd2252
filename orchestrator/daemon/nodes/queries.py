"""Answers queries about nodes and their GPUs: converts nodes, agents' reports and live jobs to the API's views."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.api import views as v
from orchestrator.core.facts.gpus import GpuState
from orchestrator.core.facts.nodes import Closure
from orchestrator.core.facts.notes import RAYLET_SILENT
from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.placement import closure_of
from orchestrator.core.scheduler.reservations import nodes_at
from orchestrator.core.scheduler.resources import left_on
from orchestrator.daemon.gpus import known_conditions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.facts.gpus import GpuCondition
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.gpu.row import GpuRow
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport


class NodeQueries:
    """Queries about nodes. ``blind`` returns those of some nodes that do not see a directory of this machine.

    ``rows`` returns every GPU; its argument is reasons of quarantine by UUID.
    """

    def __init__(
        self,
        nodes: NodeRegistry,
        loop: Loop,
        quarantine: NodeQuarantine,
        exporters: Exporters,
        *,
        blind: Callable[[str, Collection[str]], Awaitable[list[str]]],
        rows: Callable[[Mapping[str, Fact], float], Awaitable[Sequence[GpuRow]]],
    ) -> None:
        self._exporters = exporters
        self._nodes = nodes
        self._loop = loop
        self._quarantine = quarantine
        self._blind = blind
        self._rows = rows

    async def views(self) -> Sequence[v.NodeView]:
        """Return every node, by name."""
        conditions = known_conditions(self._nodes, self._exporters, self._quarantine.quarantined_gpus, driver=True)
        views = [
            node_view(
                node,
                self._nodes.reports.get(node.id),
                self._loop.jobs.begun.values(),
                lost=self._nodes.lost_gpus.get(node.id, ()),
                conditions=conditions,
            )
            for node in nodes_at(self._loop.nodes, self._loop.now(), RunTimes()).values()
        ]
        return sorted(views, key=lambda n: (n.name, n.id))

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[dict[str, Any]]:
        """Return every GPU of every node, with its holders and with values at most that old."""
        return [row.to_json() for row in await self._rows(self._quarantine.quarantined_gpus, max_age_seconds)]

    def simulated_gpus(self) -> int:
        """Return how many of the cluster's GPUs are simulated."""
        reports = self._nodes.reports.values()
        return sum(len(r.gpus) for r in reports if any(g.simulated for g in r.gpus))

    async def blind_to(self, directory: str) -> list[str]:
        """Return names of nodes that share neither the home nor this directory. Raises OSError: this machine cannot write it."""
        reports = self._nodes.reports
        apart = [node_id for node_id, report in reports.items() if not report.home_shared]
        blind = await self._blind(directory, apart) if apart else []
        return [f"{reports[node_id].hostname} ({node_id[:12]})" for node_id in blind]


def node_view(
    node: Node,
    report: NodeReport | None,
    jobs: Collection[Job],
    *,
    lost: Collection[NodeGpu] = (),
    conditions: Mapping[str, GpuCondition] | None = None,
) -> v.NodeView:
    """Return the view of one node. ``lost`` are GPUs that it had; ``conditions`` are those of its GPUs, by UUID."""
    known = conditions or {}
    free = left_on((node,), jobs)[node.id] if node.alive else None
    held = {
        uuid: (job.id, seat.rank)
        for job in jobs
        for seat in job.seats
        if seat.node_id == node.id
        for uuid in seat.gpu_uuids
    }
    gpus = tuple(
        v.GpuView(
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.model,
            job_id=held[gpu.uuid][0] if gpu.uuid in held else None,
            rank=held[gpu.uuid][1] if gpu.uuid in held else None,
            **_health(known.get(gpu.uuid)),
        )
        for gpu in sorted((*(report.gpus if report else ()), *lost), key=lambda g: g.index)
    )
    return v.NodeView(
        id=node.id,
        name=node.name,
        state=node_state(node, jobs),
        reason=_reason(node, report),
        fact=node.quarantined.to_dict() if node.quarantined else None,
        cpus_total=node.cpus,
        cpus_free=max(0.0, free.cpus) if free else 0.0,
        gpus_total=node.gpus,
        gpus_free=max(0.0, free.gpus) if free else 0.0,
        memory_total_bytes=node.memory_bytes,
        memory_free_bytes=max(0, free.memory_bytes) if free else 0,
        gpus=gpus,
        jobs=tuple(sorted({job.id for job in jobs if node.id in job.nodes})),
        labels=dict(node.labels),
        reservations=tuple(
            v.ReservationView(id=r.id, start_at=r.start, end_at=r.end, reason=r.reason, by=r.by)
            for r in node.reservations
        ),
        agent_pid=report.agent_pid if report else None,
    )


def _health(condition: GpuCondition | None) -> dict[str, Any]:
    cause = None if condition is None else condition.cause
    if condition is None or cause is None or condition.healthy:
        return {"healthy": True}
    return {
        "healthy": False,
        "problem": cause.sentence(),
        "condition": condition.state.value,
        "causes": tuple(each.to_dict() for each in condition.causes),
    }


def node_state(node: Node, jobs: Iterable[Job]) -> str:
    """Return the state of a node as users see it; some of ``jobs`` may be moving away from it."""
    match closure_of(node, jobs):
        case Closure.DOWN | Closure.UNREACHABLE:
            return "UNREACHABLE"
        case Closure.CORDONED | Closure.DRAINING as closure:
            return closure.name
        case closure if node.reserved is not None:
            return "RESERVED"
        case closure:
            return "READY" if closure is None else closure.name


def _reason(node: Node, report: NodeReport | None) -> str:
    if report is None:
        return "its agent does not answer"
    if not node.reachable:
        return RAYLET_SILENT
    if node.quarantined and not node.cordoned:
        return f"{node.quarantined.sentence()}; its health is checked before jobs start here again, `orch nodes uncordon` ends the quarantine now"
    return " ".join(report.problems)


def gpu_states(
    jobs: Collection[Job],
    reports: Mapping[str, NodeReport],
    exporters: Exporters,
    cordoned: Collection[str],
    conditions: Mapping[str, GpuCondition],
) -> dict[tuple[str, str], int]:
    """Return how many GPUs of each host are busy, idle, broken or cordoned."""
    counts: dict[tuple[str, str], int] = {}
    held = {u for j in jobs if j.gang_open for s in j.seats for u in s.gpu_uuids}
    for node_id, report in reports.items():
        for state in ("busy", "idle", "broken", "cordoned"):
            counts.setdefault((report.hostname, state), 0)
        for gpu in report.gpus:
            broken = gpu.uuid in conditions and conditions[gpu.uuid].state in (GpuState.FAILING, GpuState.LOST)
            idle = "cordoned" if node_id in cordoned else "idle"
            state = "broken" if broken else "busy" if gpu.uuid in held else idle
            counts[report.hostname, state] += 1
    for node, _ in exporters.missing():
        counts[node, "broken"] += 1
    return counts
