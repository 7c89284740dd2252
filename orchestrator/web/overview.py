"""Page with an overview: findings, running jobs, waiting jobs with reasons, and every GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from orchestrator import units
from orchestrator.api.service import JobFilter
from orchestrator.web import rendering
from orchestrator.web.answers import job_address, node_address
from orchestrator.web.rendering import render_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.service import JobService
    from orchestrator.api.views import JobView, NodeView

PARTS: Final = ("findings", "totals", "running", "queue", "gpus", "ended")
WAITING: Final = frozenset({"PENDING", "SUSPENDED"})
RUNNING: Final = frozenset({"STARTING", "RUNNING", "RECOVERING", "DRAINING"})
ENDED: Final = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
MAX_ROWS: Final = 100
"""Most rows of each table; the counts include all jobs, and a link leads to the rest."""

GPU_AGE_SECONDS: Final = 10.0
"""Maximum age of the values of a GPU that no job holds; those of other GPUs are about two seconds old."""

MAX_JOBS: Final = 5000
ENDED_ROWS: Final = 10
CONDITIONS: Final = {"quarantined": "held", "failing": "fails"}
SHOWN: Final = ("load", "memory", "job")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCell:
    """One GPU of the heat map: ``level`` is its colour, ``text`` and ``below`` say the same as text."""

    level: int | None
    text: str
    below: str
    title: str
    href: str
    trouble: bool


async def overview_parts(service: JobService, now: float, shown: str) -> Mapping[str, str]:
    """Return the parts of the overview as HTML; ``shown`` is the meaning of the GPUs' colours: load, memory or job."""
    health = await service.health()
    live = await service.jobs(JobFilter(states=RUNNING | WAITING, limit=MAX_JOBS))
    ended = await service.jobs(JobFilter(states=ENDED, limit=ENDED_ROWS))
    nodes = await service.nodes()
    rows = await service.gpus(GPU_AGE_SECONDS)
    running = [job for job in live if job.state in RUNNING]
    order = {job_id: place for place, job_id in enumerate((await service.queue_shares()).order)}
    starts = (await service.outlook(None)).starts if any(job.state == "PENDING" for job in live) else {}
    waiting = sorted((job for job in live if job.state in WAITING), key=lambda job: _place(job, order))
    return render_parts(
        "overview.html",
        PARTS,
        health=health,
        findings=_findings(live),
        running=running[:MAX_ROWS],
        running_count=len(running),
        waiting=waiting[:MAX_ROWS],
        starts=starts,
        waiting_count=len(waiting),
        ended=ended,
        several=len({job.user for job in (*live, *ended)}) > 1,
        nodes=gpus_by_node(nodes, rows, shown),
        gpu_count=len(rows),
        shown=shown,
        now=now,
    )


def _place(job: JobView, order: Mapping[str, int]) -> tuple[bool, int, float]:
    """Return a sort key by the scheduler's order; jobs without a place in it, then paused jobs, follow."""
    return job.state == "SUSPENDED", order.get(job.id, len(order)), job.submitted_at


def _findings(jobs: Sequence[JobView]) -> list[tuple[JobView, Any]]:
    pairs = [(job, one) for job in jobs for one in job.findings]
    return sorted(pairs, key=lambda pair: (pair[1].severity != "critical", -pair[1].since))


def gpus_by_node(
    nodes: Sequence[NodeView], rows: Sequence[Mapping[str, Any]], shown: str
) -> list[tuple[NodeView, list[GpuCell]]]:
    """Return the GPUs of each node, by index."""
    jobs = sorted({str(row["job_id"]) for row in rows if row.get("job_id")})
    cells: dict[str, list[GpuCell]] = {}
    for row in rows:
        cells.setdefault(str(row.get("node")), []).append(_cell(row, shown, jobs))
    return [(node, cells.get(node.name, [])) for node in nodes]


def _cell(row: Mapping[str, Any], shown: str, jobs: Sequence[str]) -> GpuCell:
    load, used, total = row.get("utilization_ratio"), row.get("memory_used_bytes"), row.get("memory_total_bytes")
    memory = used / total if used is not None and total else None
    node, job, condition = str(row.get("node")), row.get("job_id"), str(row.get("condition") or "ok")
    trouble = condition != "ok"
    text = {"load": units.percent(load), "memory": units.percent(memory)}.get(shown, units.percent(load)) or "–"
    ratio: float | None = {"load": load, "memory": memory}.get(shown)
    level = rendering.level(ratio)
    if shown == "job":
        level = 2 + 2 * (jobs.index(job) % 4) if job in jobs else 0
    facts = [
        f"GPU {row.get('index')} {row.get('model') or ''}",
        f"load {units.percent(load) or 'unknown'}",
        f"memory {units.size(used) or 'unknown'} of {units.size(total) or 'unknown'}",
        f"power {units.number(row.get('power_watts')) or 'unknown'} W",
        f"rank {row.get('rank')} of {job}" if job else "free",
        *([str(row.get("problem") or condition)] if trouble else []),
    ]
    return GpuCell(
        level=level,
        text=text if not trouble else CONDITIONS.get(condition, condition),
        below=(job if shown == "job" else f"rank {row.get('rank')}") if job else "free",
        title=rendering.clean("; ".join(facts)),
        href=job_address(str(job)) if job else f"{node_address(node)}?{urlencode({'gpu': row.get('gpu_uuid') or ''})}",
        trouble=trouble,
    )
