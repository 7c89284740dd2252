"""Nodes and their free resources, in the form that the scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from math import floor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReservation:
    """A span of wall time in which no job runs on a node: its maintenance. ``by`` is the user who reserved it."""

    id: str
    start: float
    end: float
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node. Totals are what it has; ``other_*`` is what users outside orch hold of it. Memory in bytes.

    ``quarantined`` is the reason why nothing new is placed there: ranks kept failing first on it. A node that is alive
    but not ``reachable`` may still run its ranks: nothing new is placed there. A node that does not share the daemon's
    home takes only jobs with checkpoints in a place that outlives the node. ``reserved`` is the one of its
    ``reservations`` that has begun.
    """

    id: str
    name: str
    alive: bool = True
    cordoned: bool = False
    reachable: bool = True
    quarantined: Fact | None = None
    shares_home: bool = True
    cpus: float = 0.0
    gpus: float = 0.0
    memory_bytes: int = 0
    other_cpus: float = 0.0
    other_gpus: float = 0.0
    other_memory_bytes: int = 0
    gpu_models: tuple[str, ...] = ()
    simulated: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    reservations: tuple[NodeReservation, ...] = ()
    reserved: NodeReservation | None = None

    @property
    def schedulable(self) -> bool:
        """Whether new ranks may be placed here."""
        return (
            self.alive and self.reachable and not self.cordoned and self.quarantined is None and self.reserved is None
        )


EPSILON: Final = 1e-9  # sums of fractions
_OTHERS: Final = "used by others"


@dataclass(slots=True)
class Free:
    """The free resources of a node during a round of placing.

    ``idle_gpus`` are entirely free. ``shares`` is the rest of each partly used GPU, by its id; two halves of different
    GPUs are no whole one. A rank whose GPU is still unknown is assumed to use an idle one, if there is one, because Ray
    chooses when it places the rank. Where it does not fit under these assumptions, its share is taken from the rest of
    several GPUs. ``idle_gpus`` is below 0 when more GPUs are held than the node still has.
    """

    cpus: float
    idle_gpus: int
    memory_bytes: int
    shares: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Node) -> Free:
        """Return what a node has, less what users outside orch hold."""
        gpus = node.gpus - node.other_gpus
        idle = floor(gpus + EPSILON)
        part = gpus - idle
        return cls(
            cpus=node.cpus - node.other_cpus,
            idle_gpus=idle,
            memory_bytes=node.memory_bytes - node.other_memory_bytes,
            shares={_OTHERS: part} if part > EPSILON else {},
        )

    def copy(self) -> Free:
        """Return an independent copy."""
        return Free(self.cpus, self.idle_gpus, self.memory_bytes, self.shares.copy())

    @property
    def gpus(self) -> float:
        """Return the free GPUs, shares included."""
        return self.idle_gpus + sum(self.shares.values())

    def room(self, cpus: float, gpus: float, memory_bytes: int) -> int | None:
        """Return how many ranks of this size fit; None for any number, for ranks that need nothing."""
        limits = []
        if cpus > 0:
            limits.append(int((self.cpus + EPSILON) / cpus))
        if gpus > 0:
            limits.append(self._gpu_room(gpus))
        if memory_bytes > 0:
            limits.append(self.memory_bytes // memory_bytes)
        return max(0, min(limits)) if limits else None

    def _gpu_room(self, gpus: float) -> int:
        idle = max(0, self.idle_gpus)
        if gpus >= 1:
            return int((idle + EPSILON) / gpus)
        of_shared = sum(int((left + EPSILON) / gpus) for left in self.shares.values())
        if self.idle_gpus < 0:
            of_shared = min(of_shared, max(0, int((self.gpus + EPSILON) / gpus)))
        return of_shared + idle * int(1 / gpus + EPSILON)

    def take(self, cpus: float, gpus: float, memory_bytes: int, gpu: str | None = None) -> str | None:
        """Place a rank, on the GPU with the id ``gpu`` if known; return the name of the GPU that it shares."""
        self.cpus -= cpus
        self.memory_bytes -= memory_bytes
        if gpus >= 1 or gpus <= 0:
            self.idle_gpus -= round(gpus)
            return None
        shared = gpu if gpu is not None and self._has(gpu, gpus) else self._probable(gpus)
        if shared is None:
            self._take_pieces(gpus)
            return None
        if shared not in self.shares:
            self.idle_gpus -= 1
            self.shares[shared] = 1.0
        self.shares[shared] -= gpus
        return shared

    def _has(self, gpu: str, gpus: float) -> bool:
        """Whether the GPU has this much left; less if ranks of a lost gang, which hold nothing there, still count."""
        return self.shares[gpu] >= gpus - EPSILON if gpu in self.shares else self.idle_gpus > 0

    def _probable(self, gpus: float) -> str | None:
        """Return the GPU to assume for a rank: an idle one, else the fullest with space; None where none has."""
        if self.idle_gpus > 0:
            return next(name for n in count() if (name := f"new {n}") not in self.shares)
        fitting = {name: left for name, left in self.shares.items() if left >= gpus - EPSILON}
        return min(fitting, key=fitting.__getitem__, default=None)

    def _take_pieces(self, gpus: float) -> None:
        """Take the largest pieces until they cover the rank's share."""
        for name in sorted(self.shares, key=lambda name: (-self.shares[name], name)):
            if gpus > EPSILON:
                gpus -= self.shares.pop(name)

    def give_back(self, cpus: float, gpus: float, memory_bytes: int, gpu: str | None) -> None:
        """Undo a ``take`` that returned ``gpu``; a share of an unknown GPU stays taken."""
        self.cpus += cpus
        self.memory_bytes += memory_bytes
        if gpu is None:
            self.idle_gpus += round(gpus) if gpus >= 1 else 0
        else:
            self.shares[gpu] = self.shares.get(gpu, 0.0) + gpus  # its rest may have been claimed since
            if self.shares[gpu] >= 1 - EPSILON:
                del self.shares[gpu]
                self.idle_gpus += 1

    def claim_gpus(self) -> None:
        """Claim all GPUs and shares."""
        self.idle_gpus = min(0, self.idle_gpus)
        self.shares.clear()
