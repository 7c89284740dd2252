"""Converts a node, its agent's report and the live jobs to the API's view. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.api import views as v
from orchestrator.core.facts.gpus import GpuState
from orchestrator.core.facts.nodes import Closure
from orchestrator.core.facts.notes import RAYLET_SILENT
from orchestrator.core.scheduler.placement import closure_of
from orchestrator.core.scheduler.resources import left_on

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.facts.gpus import GpuCondition
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport


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
