"""What the scheduler is told about sharing: the queues and limits of the settings, and what was used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.use import PastUse, UseHistory
from orchestrator.core.states import JobState
from orchestrator.store.port import JobFilter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.spec.settings import Settings
    from orchestrator.store.port import Store

REMEMBERED_HALF_LIVES: Final = 7.0
"""What was used before that counts for less than a hundredth."""
PAGE: Final = 1000
_ENDED: Final = frozenset(state.value for state in JobState if state.is_terminal)


class ShareBook:
    """The terms of sharing, and the use that events tell of, as values for ``decide``."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        self.sharing = Sharing() if sharing is None else sharing
        self._history = UseHistory(self.sharing.half_life)
        self._view: PastUse | None = None

    @property
    def past(self) -> PastUse:
        """What was used, as of the last event."""
        if self._view is None:
            self._view = self._history.view()
        return self._view

    def observe(self, job: Job, event: Event) -> None:
        """An event was folded: ``job`` is the record after it."""
        if self._history.observe(job, event):
            self._view = None

    async def load(self, store: Store, live: Iterable[Job], now: float) -> None:
        """Count what the live jobs and those that have ended used before this daemon."""
        self._history.remember(live)
        since = now - REMEMBERED_HALF_LIVES * self.sharing.half_life
        before: int | None = None
        while True:
            query = JobFilter(states=_ENDED, since=since, before=before, limit=PAGE)
            page = await store.jobs(query)
            self._history.remember(page)
            if len(page) < PAGE:
                break
            before = page[-1].submission.sequence
        self._view = None


def sharing_of(settings: Settings) -> Sharing:
    """The terms that the settings name."""
    return Sharing(
        queues=settings.queues,
        half_life=settings.use_half_life,
        ageing=settings.ageing,
        user_jobs=settings.user_max_jobs,
        user_gpus=settings.user_max_gpus,
    )
