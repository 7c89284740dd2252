"""The daemon's port of a runtime. There are two: Ray (``runtime.gangs``), and in memory (``runtime.memory``).

``tests/contract`` runs against both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.advance import Effect


class GangRuntime(Protocol):
    """Carries out the effects that jobs' records require, and posts events. Decides nothing."""

    def apply(self, job: Job, effect: Effect | None) -> None:
        """Start ``effect`` for ``job``; None cancels the one in progress. Returns at once.

        Every effect is idempotent: it finds what an earlier daemon or call has created. One effect at a time per job; a
        newer one replaces an older one, and a repeated call changes nothing.
        """
        ...

    async def survey(self, jobs: Collection[Job]) -> None:
        """End what exists and the records of live jobs do not know, and post it: the store is an older copy.

        Call once, before the first effect.
        """
        ...

    def abandon(self, job: Job) -> None:
        """Go on ending the gang of a job whose record was ended by force; ``job`` is the record before. Posts nothing."""
        ...

    def report_reachability(self, jobs: Iterable[Job]) -> None:
        """Post the jobs that have ranks on nodes that do not answer, and those that no longer have any."""
        ...

    def forget_all(self) -> None:
        """Post each gang as lost: the control plane has died, and every gang with it."""
        ...

    async def close(self) -> None:
        """Stop watching. Gangs, ranks and their numbered events stay: the next daemon requests them again."""
        ...
