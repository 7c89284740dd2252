"""What a round of placing has found out already, so that it does not try a gang that cannot fit. Pure.

Within a round what is free only shrinks. So once ranks of one shape (size, GPU model, need of the daemon's home) have claimed all
that they find room in, no later job with ranks of that shape fits, and it has nothing to claim either: it is skipped with the
reason alone. A queue of many equal jobs costs a look at each instead of a walk over all nodes for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.scheduler.placement import could_ever_fit, needs_home, rank_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.cluster import Free, Node
    from orchestrator.core.job.record import Job


class Shape(NamedTuple):
    """What decides on which nodes a rank of the job has room."""

    size: tuple[float, float, int]
    gpu_model: str | None
    at_home: bool


class Skips:
    """The shapes without room, the gangs that can never fit, and the sums of what is free, for one round."""

    def __init__(self, free: Mapping[str, Free], nodes: Mapping[str, Node]) -> None:
        self._free = free
        self._nodes = nodes
        self._full: set[Shape] = set()
        self._fitting: dict[tuple[Shape, int, str], bool] = {}
        self._sums: dict[bool, tuple[float, float]] = {}

    def full(self, shape: Shape) -> bool:
        """Whether no rank of this shape has room any more."""
        return shape in self._full

    def fill(self, shape: Shape) -> None:
        """Note that no rank of this shape has room any more."""
        self._full.add(shape)

    def fits_ever(self, job: Job, shape: Shape) -> bool:
        """``could_ever_fit``, asked once for all equal gangs."""
        gang = (shape, job.size.least, job.spec.resources.placement_strategy)
        if gang not in self._fitting:
            self._fitting[gang] = could_ever_fit(job, self._nodes)
        return self._fitting[gang]

    def sums(self, *, whole: bool) -> tuple[float, float]:
        """Free GPUs, only whole ones if asked so, and free CPUs."""
        if whole not in self._sums:
            left = list(self._free.values())
            self._sums[whole] = (
                sum(max(0.0, f.idle_gpus if whole else f.gpus) for f in left),
                sum(max(0.0, f.cpus) for f in left),
            )
        return self._sums[whole]

    def changed(self) -> None:
        """Something was taken or claimed."""
        self._sums.clear()


def shape_of(job: Job) -> Shape:
    """The shape of the job's ranks."""
    return Shape(rank_size(job), job.spec.resources.resources_per_worker.gpu_model, bool(needs_home(job)))
