"""Computes the capacity of the cluster's nodes: their totals, less what other users hold, less lost GPUs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from orchestrator.core.cluster import Node
from orchestrator.runtime.nodes.ray_nodes import NOTHING, Held, held_by_others

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.gpu_reservations import GpuReservations
    from orchestrator.runtime.cluster.last_seen import LastSeen
    from orchestrator.runtime.cluster.registry import NodeRegistry
    from orchestrator.runtime.nodes.control_plane import RayNode

SETTLE_SECONDS: Final = 0.3  # Ray's own numbers lag by less


class Capacity:
    """Computes free capacity. ``own_groups`` names this daemon's placement groups; all other use belongs to other users.

    A node that is down keeps its last known resources: jobs that fit only there wait for it.
    """

    def __init__(
        self,
        ray: RayConnection,
        nodes: NodeRegistry,
        holds: GpuReservations,
        own_groups: Callable[[], Collection[str]],
        seen: LastSeen,
    ) -> None:
        self._ray = ray
        self._nodes = nodes
        self._holds = holds
        self._own_groups = own_groups
        self._seen = seen
        self._others: dict[str, Held] = {}

    async def look_at_others(self, raw: Mapping[str, RayNode]) -> None:
        """Update what other users hold. A change counts once a second reading, SETTLE_SECONDS later, confirms it."""
        others: dict[str, Held] = await self._ray.call(held_by_others, raw, self._own_groups())
        if others == self._others:
            return
        await asyncio.sleep(SETTLE_SECONDS)
        again: dict[str, Held] = await self._ray.call(held_by_others, raw, self._own_groups())
        self._others = {node_id: held.least(again.get(node_id, NOTHING)) for node_id, held in others.items()}

    def nodes(self, raw: Mapping[str, RayNode]) -> dict[str, Node]:
        """Return the nodes as the scheduler sees them, without dead ones that have joined again under another id."""
        superseded = self._seen.superseded(raw)
        return {node_id: self.node(node) for node_id, node in raw.items() if node_id not in superseded}

    def node(self, raw: RayNode) -> Node:
        """Return the node as the scheduler sees it."""
        if raw.id not in self._nodes.reports:
            return self._down(raw)
        report, held = self._nodes.reports[raw.id], self._others.get(raw.id, NOTHING)
        return Node(
            id=raw.id,
            name=report.hostname,
            alive=raw.alive,
            reachable=raw.id not in self._nodes.silent,
            shares_home=report.home_shared,
            cpus=raw.total.get("CPU", 0.0),
            gpus=raw.total.get("GPU", 0.0),
            memory_bytes=int(raw.total.get("memory", 0)),
            other_cpus=held.cpus,
            # Ray's numbers include the GPUs that this daemon has reserved.
            other_gpus=max(held.gpus, self._holds.per_node().get(raw.id, 0)) + self._lost_and_free(raw.id),
            other_memory_bytes=held.memory_bytes,
            gpu_models=tuple(sorted({g.model for g in report.gpus})),
            simulated=any(g.simulated for g in report.gpus),
        )

    def _down(self, raw: RayNode) -> Node:
        """Return a node that is dead, or whose agent has not answered yet, as it was last seen."""
        seen = self._seen.get(raw.id)
        return Node(
            id=raw.id,
            name=seen.name if seen else raw.hostname,
            alive=False,
            reachable=raw.id not in self._nodes.silent,
            shares_home=seen is None or seen.shares_home,
            cpus=raw.total.get("CPU", 0.0),
            gpus=raw.total.get("GPU", 0.0),
            memory_bytes=int(raw.total.get("memory", 0)),
            gpu_models=seen.gpu_models if seen else (),
            simulated=bool(seen and seen.simulated),
        )

    def _lost_and_free(self, node_id: str) -> int:
        return sum(gpu.uuid not in self._holds.held for gpu in self._nodes.lost_gpus.get(node_id, ()))
