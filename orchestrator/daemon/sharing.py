"""Queues as the daemon holds them: their table with its changes, past use, and what refuses a job that they cannot take."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import NotPermittedError, RefusedError
from orchestrator.core.events import ClockStepped, FindingOpened
from orchestrator.core.facts.findings import GpusUnused, JobIdle
from orchestrator.core.scheduler.shares import PastUse, QueueTree, Sharing, UseHistory
from orchestrator.core.states import JobState
from orchestrator.core.stored import spec_bytes
from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.queues import QueueSpec, queue_problems
from orchestrator.store.records import JobFilter
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from orchestrator.api.service import Caller
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.spec.model import JobSpec
    from orchestrator.spec.settings import Settings
    from orchestrator.store.records import StoredQueueChange
    from orchestrator.store.store import Store


def check_queue(spec: JobSpec, sharing: Sharing) -> None:
    """Raise RefusedError where the job can never start under these terms, even on an idle cluster."""
    tree = QueueTree(sharing.queues)
    refusal = tree.refusal(spec.queue)
    if refusal is not None:
        raise RefusedError(refusal, hint="set queue: to one of them; `orch queue` shows what each may have")
    gpus = _least_ranks(spec) * spec.resources.resources_per_worker.gpu
    if not gpus:
        return
    for queue in tree.path(spec.queue):
        if queue.maximum is not None and gpus > queue.maximum:
            raise RefusedError(
                f"the job needs {gpus:g} GPUs, and queue {queue.name} never holds more than {queue.maximum}",
                hint="ask for fewer ranks, or name another queue",
            )
    if sharing.user_gpus is not None and gpus > sharing.user_gpus:
        raise RefusedError(
            f"the job needs {gpus:g} GPUs, and the limit of a user is {sharing.user_gpus} (ORCH_USER_MAX_GPUS)",
            hint="ask for fewer ranks",
        )


def check_priority(priority: int, caller: Caller, settings: Settings) -> None:
    """Raise NotPermittedError for a priority that only the daemon's owner may give."""
    if priority > settings.user_max_priority and not caller.is_owner:
        raise NotPermittedError(
            f"{caller.user} may give a job at most priority {settings.user_max_priority} (ORCH_USER_MAX_PRIORITY), not {priority}",
            hint="leave priority out, or ask the daemon's owner to raise it with `orch update JOB --priority`",
        )


class QueueLimits:
    """What each user may have in the queue; ``jobs`` are the live ones.

    Submissions under way count, so that many at once do not pass together.
    """

    def __init__(self, jobs: Callable[[], Iterable[Job]], settings: Settings) -> None:
        self._jobs = jobs
        self._settings = settings
        self._coming: dict[int, list[Sequence[JobSpec]]] = {}

    @contextmanager
    def adding(self, specs: Sequence[JobSpec], caller: Caller) -> Iterator[None]:
        """Take room for jobs until they are in the loop, or refused. Raises RefusedError, NotPermittedError."""
        for priority in {spec.priority for spec in specs}:
            check_priority(priority, caller, self._settings)
        coming = self._coming.setdefault(caller.uid, [])
        self._check([spec for group in (*coming, specs) for spec in group], caller)
        coming.append(specs)
        try:
            yield
        finally:
            coming.remove(specs)

    def _check(self, new: Sequence[JobSpec], caller: Caller) -> None:
        own = [job.submission.spec_bytes for job in self._jobs() if job.submission.uid == caller.uid]
        most, most_bytes = self._settings.user_max_queued, self._settings.user_max_queued_bytes
        if len(own) + len(new) > most:
            raise RefusedError(
                f"{caller.user} may have {most} jobs that have not ended (ORCH_USER_MAX_QUEUED), and has {len(own)}",
                hint="wait until some have ended, cancel some, or ask the daemon's owner to raise ORCH_USER_MAX_QUEUED",
            )
        held = sum(own)
        if held + sum(map(spec_bytes, new)) > most_bytes:
            raise RefusedError(
                f"the job files of {caller.user}'s jobs that have not ended may take {size(most_bytes)}"
                f" (ORCH_USER_MAX_QUEUED_BYTES), and take {size(held)}",
                hint="keep data in files of the working directory instead of `env`, wait until some jobs have ended,"
                " or ask the daemon's owner to raise ORCH_USER_MAX_QUEUED_BYTES",
            )


def _least_ranks(spec: JobSpec) -> int:
    match spec.resources.num_workers:
        case ElasticWorkers() as elastic:
            return elastic.min
        case int(ranks):
            return ranks
        case _:  # auto: as advised, else the free GPUs at its start
            auto = spec.resources.auto
            return auto.bounds[0] if auto else 1


IDLE: Final = (JobIdle, GpusUnused)
REMEMBERED_HALF_LIVES: Final = 7.0
"""Use before that counts less than a hundredth."""
PAGE: Final = 1000
_ENDED: Final = frozenset(state.value for state in JobState if state.is_terminal)


class SharingState:
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
