"""The capacity of the cluster's nodes: their totals, less what other users hold, less lost GPUs; and GPUs kept from Ray.

Ray picks the GPU ids and offers no way to exclude one. So a placeholder actor reserves each GPU that no job may get.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.cluster import Node
from orchestrator.runtime.deadline import within
from orchestrator.runtime.nodes import control_plane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.runtime.cluster.connection import RayConnection
    from orchestrator.runtime.cluster.nodes import LastSeen, NodeRegistry
    from orchestrator.runtime.nodes.agent import NodeGpu
    from orchestrator.runtime.nodes.control_plane import RayNode

SETTLE_SECONDS: Final = 0.3  # Ray's own numbers lag by less
TAKE_SECONDS: Final = 10.0
_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resources of a node that other users hold. Memory in bytes."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0

    def least(self, other: Held) -> Held:
        """Return what both readings report as held."""
        return Held(
            cpus=min(self.cpus, other.cpus),
            gpus=min(self.gpus, other.gpus),
            memory_bytes=min(self.memory_bytes, other.memory_bytes),
        )


NOTHING: Final = Held()


def held_by_others(nodes: Mapping[str, RayNode], own_groups: Collection[str]) -> dict[str, Held]:
    """Return what is in use on each live node beyond the placement groups named in ``own_groups``.

    Ray's numbers of free resources lag by a tenth of a second: take the least of two readings.
    """
    own = _reserved(own_groups)
    found = {}
    for node_id, available in control_plane.available().items():
        node = nodes.get(node_id)
        if node is None or not node.alive:
            continue
        mine = own.get(node_id, {})
        left = {
            name: max(0.0, node.total.get(name, 0.0) - available.get(name, 0.0) - mine.get(name, 0.0))
            for name in ("CPU", "GPU", "memory")
        }
        held = Held(cpus=_clean(left["CPU"]), gpus=_clean(left["GPU"]), memory_bytes=int(left["memory"]))
        if held != NOTHING:
            found[node_id] = held
    return found


def _reserved(names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return what placement groups reserve, by node and resource."""
    reserved: dict[str, dict[str, float]] = {}
    for group in control_plane.groups():
        if group.name not in names:
            continue
        for node_id, bundle in group.bundles:
            node = reserved.setdefault(node_id, {})
            for name, amount in bundle.items():
                node[name] = node.get(name, 0.0) + amount
    return reserved


def _clean(amount: float) -> float:
    return round(amount, 4) if amount > _EPSILON else 0.0


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


class _Placeholder:
    """Placeholder actor that reserves a GPU."""

    def gpu_ids(self) -> list[str]:
        """Return Ray's ids of this actor's GPUs."""
        import ray

        return [str(i) for i in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class GpuReservations:
    """Creates and ends placeholder actors. ``held`` maps each reserved GPU to its node. Decides nothing.

    Actors with one GPU each are created until one of them has the GPU in question; it stays, and the others end at once.
    Ray ends the actors with this daemon's connection; the next daemon creates its own.
    """

    def __init__(self, ray: RayConnection) -> None:
        self._ray = ray
        self._placeholders: dict[str, Any] = {}
        self._serial = asyncio.Lock()
        self.held: dict[str, str] = {}

    def per_node(self) -> Mapping[str, int]:
        """Return how many GPUs are reserved on each node."""
        return Counter(self.held.values())

    def forget_all(self) -> None:
        """Drop all reservations: Ray's head has died, and every actor with it."""
        self._placeholders.clear()
        self.held.clear()

    async def keep(self, wanted: Mapping[str, tuple[str, NodeGpu, int]]) -> bool:
        """Reserve exactly these GPUs (by UUID: node, GPU, GPUs of the node); return whether anything changed.

        A GPU that is in use cannot be reserved: call again later.
        """
        async with self._serial:
            changed = False
            for uuid in self.held.keys() - wanted.keys():
                del self.held[uuid]
                await self._end(self._placeholders.pop(uuid))
                changed = True
            for uuid in wanted.keys() - self.held.keys():
                node_id, gpu, count = wanted[uuid]
                placeholder = await self._take(node_id, str(gpu.index), count)
                if placeholder is not None:
                    self._placeholders[uuid], self.held[uuid] = placeholder, node_id
                    changed = True
            return changed

    async def _take(self, node_id: str, index: str, count: int) -> Any:
        others = []
        try:
            for _ in range(count):
                placeholder = await self._ray.call(_make, node_id)
                try:
                    ids = await within(TAKE_SECONDS, placeholder.gpu_ids.remote())
                except Exception:  # no GPU is free, or the node is gone
                    others.append(placeholder)
                    return None
                if index in ids:
                    return placeholder
                others.append(placeholder)
            return None
        finally:
            for other in others:
                await self._end(other)

    async def _end(self, placeholder: Any) -> None:
        import ray

        await self._ray.call(ray.kill, placeholder)


def _make(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return ray.remote(_Placeholder).options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote()
