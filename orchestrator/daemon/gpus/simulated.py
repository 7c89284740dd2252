"""Sends nodes the processes that run on each simulated GPU, which has no driver that reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.runtime.deadline import within

if TYPE_CHECKING:
    from collections.abc import Collection

    from orchestrator.core.job.record import Job
    from orchestrator.runtime.cluster.nodes import NodeRegistry


class SimulatedGpus:
    """Sends the agents of nodes with simulated GPUs the processes on each of them, after each change."""

    def __init__(self, nodes: NodeRegistry) -> None:
        self._nodes = nodes
        self._assigned: dict[str, dict[int, tuple[int, ...]]] = {}

    async def assign(self, holding: Collection[Job]) -> None:
        """Send each of the nodes the processes of the jobs by GPU."""
        wanted: dict[str, dict[int, tuple[int, ...]]] = {
            node_id: {} for node_id, report in self._nodes.reports.items() if any(g.simulated for g in report.gpus)
        }
        for job in holding:
            for seat in job.seats:
                if seat.node_id in wanted and seat.rank < len(job.pids):
                    for gpu in seat.gpu_ids:
                        pids = wanted[seat.node_id].get(int(gpu), ())
                        wanted[seat.node_id][int(gpu)] = (*pids, job.pids[seat.rank])
        for node_id, assignment in wanted.items():
            agent = self._nodes.agents.get(node_id)
            if agent is not None and self._assigned.get(node_id, {}) != assignment:
                await within(10.0, agent.assign.remote(assignment))
                self._assigned[node_id] = assignment
