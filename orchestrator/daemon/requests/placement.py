"""Computes where and when a submission would start now. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.api import views as v
from orchestrator.core.scheduler.conditions import check, hindrance
from orchestrator.core.scheduler.placement import capacity, place
from orchestrator.core.scheduler.reservations import closed_to, nodes_at
from orchestrator.core.scheduler.resources import free_on
from orchestrator.core.scheduler.scheduler import reserved_for, shares_of, waiting_order
from orchestrator.core.states import JobState
from orchestrator.units import plural

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.scheduler import State


def placement(asked: Job, state: State, now: float) -> dict[str, Any]:
    """Return fields of ``api.views.PlanReply`` for a job that can fit, beside the live ones of ``state``."""
    nodes = state.nodes
    blocked = hindrance(asked, state.jobs, state.ended)
    if blocked is not None:
        return {"starts": "later", "reason": blocked.sentence(), "num_workers": asked.num_workers}
    held = check([asked], (), state.jobs, state.ended, now).waiting.get(asked.id)
    if held is not None:
        return {"starts": "later", "reason": held.sentence(), "num_workers": asked.num_workers}
    if asked.state is JobState.SUSPENDED:
        return {"starts": "later", "reason": "held until `orch release`", "num_workers": asked.num_workers}
    order = waiting_order(replace(state, jobs={**state.jobs, asked.id: asked}), now)
    ahead = order[: next(place for place, job in enumerate(order) if job.id == asked.id)]
    shares = shares_of(state, now)
    limit = shares.hindrance(asked)
    if limit is not None:
        return {"starts": "later", "reason": limit.sentence(), "num_workers": asked.num_workers}
    worker = asked.spec.resources.resources_per_worker
    nodes = nodes_at(nodes, now, state.past.run_times)
    kept = reserved_for(asked, nodes, closed_to(asked, nodes))
    free = free_on(nodes.values(), state.jobs.values())
    placed = None if ahead else place(asked, free, nodes)
    most = shares.most_ranks(asked)
    if placed is not None and most > len(placed):
        placed = place(asked, free, nodes, ranks=min(most, capacity(asked, free, nodes)))
    ranks = asked.num_workers if placed is None else len(placed)
    common = {"num_workers": ranks, "ahead": tuple(j.id for j in ahead)}
    if placed is None:
        reason = f"behind {plural(len(ahead), 'queued job')}" if ahead else "its GPUs and CPUs are in use"
        reason = "; ".join(each.sentence() for each in kept) if kept and not ahead else reason
        return {"starts": "later", "reason": reason, **common}
    seats = tuple(
        v.SeatPlan(rank=rank, node=nodes[node].name, gpus=worker.gpu, cpus=worker.cpu)
        for rank, node in enumerate(placed)
    )
    return {"starts": "now", "reason": "there is room", "seats": seats, **common}
