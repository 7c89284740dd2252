"""The scheduler's input about sharing: the queues and limits of the settings, and past use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.events import ClockStepped, FindingOpened
from orchestrator.core.facts.findings import GpusUnused, JobIdle
from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.use import PastUse, UseHistory
from orchestrator.core.states import JobState
from orchestrator.spec.queues import QueueSpec, queue_problems
from orchestrator.store.port import JobFilter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.settings import Settings
    from orchestrator.store.port import Store, StoredQueueChange

IDLE: Final = (JobIdle, GpusUnused)
REMEMBERED_HALF_LIVES: Final = 7.0
"""Use before that counts less than a hundredth."""
PAGE: Final = 1000
_ENDED: Final = frozenset(state.value for state in JobState if state.is_terminal)


class ShareBook:
    """The terms of sharing, and the use according to events, as values for ``decide``."""

    def __init__(self, sharing: Sharing | None = None) -> None:
        self.sharing = Sharing() if sharing is None else sharing
        self.changes: dict[str, StoredQueueChange] = {}
        self._history = UseHistory(self.sharing.half_life)
        self._view: PastUse | None = None
        self.idle: dict[JobId, float] = {}

    @property
    def past(self) -> PastUse:
        """Return the use as of the last event."""
        if self._view is None:
            self._view = self._history.view()
        return self._view

    def observe(self, job: Job, event: Event) -> None:
        """Count a folded event: ``job`` is the record after it."""
        if self._history.observe(job, event):
            self._view = None
        self.observe_idle(job, event)

    def observe_idle(self, job: Job, event: Event) -> None:
        """Note when the job's GPUs became idle. An event may be repeated, with a later record: a restarted daemon reads those of its live jobs."""
        if isinstance(event, ClockStepped) and job.id in self.idle:
            self.idle[job.id] += event.seconds
        if not any(isinstance(finding, IDLE) for finding in job.findings):
            self.idle.pop(job.id, None)
        elif isinstance(event, FindingOpened) and isinstance(event.finding, IDLE):
            self.idle[job.id] = event.at

    def change(self, queues: tuple[QueueSpec, ...], change: StoredQueueChange) -> None:
        """Set the queues, because of ``change``."""
        self.sharing = replace(self.sharing, queues=queues)
        self.changes[change.name] = change

    def _replay(self, stored: Iterable[StoredQueueChange]) -> tuple[str, ...]:
        """Apply stored changes to the queues of the settings; return the queues whose change no longer fits those."""
        left_out = []
        for change in stored:
            queue = queue_of(change.body)
            table = () if queue is None else tuple({q.name: q for q in (*self.sharing.queues, queue)}.values())
            if queue is None or queue.name != change.name or queue_problems(table):
                left_out.append(change.name)
            else:
                self.change(table, change)
        return tuple(left_out)

    async def load(self, store: Store, live: Iterable[Job], now: float) -> tuple[str, ...]:
        """Count the use of live and ended jobs before this daemon, and apply stored changes of queues.

        Returns the queues whose stored change does not fit the settings any more, and has no effect.
        """
        left_out = self._replay(await store.queue_changes())
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
        return left_out


def queue_of(body: Mapping[str, Any]) -> QueueSpec | None:
    """Return a stored queue; None where it is unreadable."""
    try:
        queue = QueueSpec(**body)
    except TypeError:  # written by a later version
        return None
    whole = [queue.guaranteed, *([] if queue.maximum is None else [queue.maximum])]
    texts = isinstance(queue.name, str) and isinstance(queue.parent, str)
    usable = texts and isinstance(queue.weight, int | float) and all(isinstance(gpus, int) for gpus in whole)
    return queue if usable else None


def sharing_of(settings: Settings) -> Sharing:
    """Return the terms in the settings."""
    return Sharing(
        queues=settings.queues,
        half_life=settings.use_half_life,
        ageing=settings.ageing,
        user_jobs=settings.user_max_jobs,
        user_gpus=settings.user_max_gpus,
        reclaim_idle=settings.reclaim_idle,
    )
