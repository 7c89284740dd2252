"""Results of a round of placing, so that it does not try a gang that cannot fit. Pure.

Within a round free resources only shrink. So once ranks of one shape (size, GPU model, nodes, need of home) have
claimed all that they fit in, no later job with ranks of that shape fits, and it has nothing to claim either. The round
then skips all equal jobs of a lane (``WaitingOrder.pass_over``), whatever their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.cluster import Free
    from orchestrator.core.scheduler.lanes import Shape


class Skips:
    """The shapes that no longer fit, and the sums of free resources, for one round."""

    def __init__(self, free: Mapping[str, Free]) -> None:
        self._free = free
        self._with_gpus = {node_id: left for node_id, left in free.items() if left.idle_gpus > 0 or left.shares}
        self._full: set[Shape] = set()
        self._sums: dict[bool, tuple[float, float]] = {}

    def full(self, shape: Shape) -> bool:
        """Whether no rank of this shape fits any more."""
        return shape in self._full or (shape.size[1] > 0 and not self._with_gpus)

    def fill(self, shape: Shape) -> None:
        """Record that no rank of this shape fits any more."""
        self._full.add(shape)

    def where(self, shape: Shape) -> Mapping[str, Free]:
        """Return the free resources of the nodes that a rank of this shape may fit on."""
        return self._with_gpus if shape.size[1] > 0 else self._free

    def sums(self, *, whole: bool) -> tuple[float, float]:
        """Return free GPUs, only whole ones if requested, and free CPUs."""
        if whole not in self._sums:
            with_gpus = self._with_gpus.values()
            self._sums[whole] = (
                sum(max(0.0, f.idle_gpus if whole else f.gpus) for f in with_gpus),
                sum(max(0.0, f.cpus) for f in self._free.values()),
            )
        return self._sums[whole]

    def changed(self) -> None:
        """Record that something was taken or claimed."""
        self._sums.clear()
        if self._with_gpus:
            spent = [i for i, f in self._with_gpus.items() if f.idle_gpus <= 0 and not f.shares]
            for node_id in spent:
                del self._with_gpus[node_id]
