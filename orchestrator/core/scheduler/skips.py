"""Results of a round of placing, so that it does not try a gang that cannot fit. Pure.

Within a round free resources only shrink. So once ranks of one shape (size, GPU model, nodes, labels, whether they need
the daemon's home, and the nodes that are reserved before the job would end) have claimed all that they fit in, no later
job with ranks of that shape fits, and it has nothing to claim either. The round then skips all equal jobs of a lane
(``WaitingOrder.pass_over``), whatever their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from orchestrator.core.scheduler.room.vacancy import Vacancy


class Skips:
    """The shapes that no longer fit, and the sums of free resources, for one round."""

    def __init__(self, free: Vacancy) -> None:
        self._free = free
        self._full: set[Hashable] = set()

    def full(self, shape: Hashable) -> bool:
        """Whether no rank of this shape fits any more."""
        return shape in self._full

    def fill(self, shape: Hashable) -> None:
        """Record that no rank of this shape fits any more."""
        self._full.add(shape)

    def sums(self, *, whole: bool) -> tuple[float, float]:
        """Return free GPUs, only whole ones if requested, and free CPUs."""
        gpus, idle, cpus = self._free.sums()
        return idle if whole else gpus, cpus
