"""Keeps Ray from handing out certain GPUs: a placeholder actor reserves each of them. Decides nothing.

Ray picks the GPU ids and offers no way to exclude one. Actors with one GPU each are therefore created until one of them
has the GPU in question; it stays, and the others end at once. Ray ends the actors with this daemon's connection; the
next daemon creates its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from orchestrator.runtime.deadline import within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport

TAKE_SECONDS: Final = 10.0


def still_there(report: NodeReport, first: Sequence[NodeGpu]) -> tuple[NodeReport, tuple[NodeGpu, ...]]:
    """Return the report with those of the node's ``first`` GPUs that it still lists, and the GPUs that it no longer lists.

    Ray's GPU ids are positions at the time when the node started: a lost GPU must not shift the ids after it.
    """
    here = {gpu.uuid for gpu in report.gpus}
    gpus = tuple(gpu for gpu in first if gpu.uuid in here)
    return replace(report, gpus=gpus), tuple(gpu for gpu in first if gpu.uuid not in here)


class _Placeholder:
    """Placeholder actor that reserves a GPU."""

    def gpu_ids(self) -> list[str]:
        """Return Ray's ids of this actor's GPUs."""
        import ray

        return [str(i) for i in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]


class RayCalls(Protocol):
    """Runs blocking calls of Ray."""

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what ``function(*args)`` returns; raise what it raises, and TimeoutError."""
        ...


class GpuReservations:
    """Creates and ends placeholder actors. ``held`` maps each reserved GPU to its node."""

    def __init__(self, ray: RayCalls) -> None:
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
