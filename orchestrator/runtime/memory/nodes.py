"""One node: its GPUs, the gangs that hold them, and whether it is alive and answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId

Holder: TypeAlias = "tuple[JobId, int, int]"
"""A job, its gang, and a rank of it."""

_ROUNDING = 1e-9


class UnsafeOrderError(AssertionError):
    """An order that must never be given: a GPU twice, or a second attempt or gang of a job at the same time."""


@dataclass(frozen=True, slots=True)
class Hold:
    """GPUs and CPUs of a node that one rank holds."""

    gpus: tuple[int, ...]
    share: float
    """Share of each of those GPUs."""
    cpus: float


@dataclass(slots=True)
class MemoryNode:
    """A node; ``node`` is the scheduler's initial view, ``slow`` the extra delay of each message, in seconds.

    By ``clock_ahead`` seconds its clock is ahead of the cluster's time.
    """

    node: Node
    alive: bool = True
    silent: bool = False
    slow: float = 0.0
    clock_ahead: float = 0.0
    died_at: float = 0.0
    lost: set[int] = field(default_factory=set)
    held: dict[Holder, Hold] = field(default_factory=dict)
    abandoned: set[Holder] = field(default_factory=set)
    """Those that the record has given up, as `orch cancel --force` does: for the daemon they are other users of the node."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Requests that arrived while it was silent."""

    def view(self) -> Node:
        """Return the node as the scheduler sees it."""
        given_up = [self.held[holder] for holder in self.abandoned & self.held.keys()]
        gpus = self.node.other_gpus + len(self.lost) + sum(hold.share * len(hold.gpus) for hold in given_up)
        cpus = self.node.other_cpus + sum(hold.cpus for hold in given_up)
        return replace(self.node, alive=self.alive, reachable=not self.silent, other_gpus=gpus, other_cpus=cpus)

    def take(self, holder: Holder, gpus: float, cpus: float) -> Hold | None:
        """Reserve a rank's share; None when too few healthy GPUs are left, or a gang that was given up holds them.

        Raises UnsafeOrderError where a gang of the record holds them.
        """
        found = self._find(gpus)
        if found is None:
            return None
        if sum(h.cpus for h in self.held.values()) + cpus > self.node.cpus + _ROUNDING:
            if self.abandoned & self.held.keys():
                return None
            raise UnsafeOrderError(f"{holder} gets CPUs of {self.node.id} that {sorted(self.held)} hold")
        hold = self.held[holder] = Hold(found, min(gpus, 1.0), cpus)
        return hold

    def _find(self, gpus: float) -> tuple[int, ...] | None:
        used = dict.fromkeys(range(int(self.node.gpus)), 0.0)
        for hold in self.held.values():
            for index in hold.gpus:
                used[index] += hold.share
        share, count = (gpus, 1) if 0 < gpus < 1 else (1.0, round(gpus))
        fitting = [i for i, taken in used.items() if taken + share <= 1 + _ROUNDING]
        healthy = [i for i in fitting if i not in self.lost]
        if len(fitting) < count and self.abandoned & self.held.keys():
            return None
        if len(fitting) < count:
            raise UnsafeOrderError(f"{gpus:g} GPUs of {self.node.id} are given away twice; {self.held} hold them")
        if len(healthy) < count:
            return None
        healthy.sort(key=lambda i: (-used[i], i))  # as in Ray, a shared GPU is filled first
        return tuple(healthy[:count])

    def uuid(self, index: int) -> str:
        """Return a GPU's UUID."""
        return f"GPU-{self.node.id}-{index}"
