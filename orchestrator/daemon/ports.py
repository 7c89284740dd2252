"""What the daemon asks of a runtime. There are two: Ray (``runtime.gangs``), and the one in memory (``runtime.memory``).

``tests/contract`` holds both to what is written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.diagnosis.health import RankLook
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.effects import Effect


class GangRuntime(Protocol):
    """Carries out what jobs' records require, and posts what happens as events. Decides nothing."""

    def apply(self, job: Job, effect: Effect | None) -> None:
        """Have ``effect`` done for ``job``; None ends what is under way. Returns at once.

        Every effect is idempotent: it finds what an earlier daemon, or an earlier call, has made. One effect at a time
        per job; a newer one replaces an older, and asking for the one under way changes nothing.
        """
        ...

    def note_reach(self, jobs: Iterable[Job]) -> None:
        """Post which jobs have ranks on nodes that do not answer, and which no longer have any."""
        ...

    def forget_all(self) -> None:
        """The control plane is gone, and every gang with it: post each gang as lost."""
        ...

    async def close(self) -> None:
        """Stop watching. Gangs, ranks and their numbered events stay: the next daemon asks for them again."""
        ...


class NodeSource(Protocol):
    """The nodes, as the runtime sees them."""

    @property
    def connected(self) -> bool:
        """The control plane can be asked."""
        ...

    async def refresh(self) -> dict[str, Node]:
        """Every node that there is or was, by id, with what is free of it for this daemon."""
        ...


class RankInspector(Protocol):
    """Questions to the ranks of a running job that change nothing."""

    async def look(self, job: Job, *, stacks: bool, ranks: Sequence[int] | None = None) -> dict[int, RankLook]:
        """A look at the processes of each rank that can be reached, or of those in ``ranks``."""
        ...

    async def note(self, job: Job, lines: Mapping[int, Sequence[str]]) -> None:
        """Write lines into the logs of ranks."""
        ...
