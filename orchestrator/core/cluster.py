"""Nodes and what is free on them, as the scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node. Totals are what it has; ``other_*`` is what users outside orch hold of it. Memory in bytes.

    ``quarantined`` says why nothing new goes there for now: ranks kept failing first on it.
    A node that is alive but not ``reachable`` may still run what it ran: nothing new goes there. One that does not share
    the daemon's home takes only jobs whose checkpoints go to a place of their own, which outlives it.
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

    @property
    def schedulable(self) -> bool:
        """New ranks may be placed here."""
        return self.alive and self.reachable and not self.cordoned and self.quarantined is None


@dataclass(slots=True)
class Free:
    """What is left on a node while a round of placing goes on."""

    cpus: float
    gpus: float
    memory_bytes: int

    def fits(self, cpus: float, gpus: float, memory_bytes: int) -> bool:
        """A rank of this size can be placed."""
        return self.cpus >= cpus - 1e-9 and self.gpus >= gpus - 1e-9 and self.memory_bytes >= memory_bytes

    def take(self, cpus: float, gpus: float, memory_bytes: int) -> None:
        """Place it."""
        self.cpus -= cpus
        self.gpus -= gpus
        self.memory_bytes -= memory_bytes
