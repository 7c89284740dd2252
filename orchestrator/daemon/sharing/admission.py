"""Refuses a job if its queue does not exist, if it could never start within a quota or limit, or if its user may not add it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestrator.api.errors import NotPermittedError, RefusedError
from orchestrator.core.scheduler.queues import QueueTree
from orchestrator.core.stored.job_record import spec_bytes
from orchestrator.spec.model import ElasticWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from orchestrator.api.service import Caller
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.spec.job import JobSpec
    from orchestrator.spec.settings import Settings


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
        own = [job.spec for job in self._jobs() if job.submission.uid == caller.uid]
        most, most_bytes = self._settings.user_max_queued, self._settings.user_max_queued_bytes
        if len(own) + len(new) > most:
            raise RefusedError(
                f"{caller.user} may have {most} jobs that have not ended (ORCH_USER_MAX_QUEUED), and has {len(own)}",
                hint="wait until some have ended, cancel some, or ask the daemon's owner to raise ORCH_USER_MAX_QUEUED",
            )
        size = sum(map(spec_bytes, own))
        if size + sum(map(spec_bytes, new)) > most_bytes:
            raise RefusedError(
                f"the job files of {caller.user}'s jobs that have not ended may take {most_bytes / 1e6:g} MB"
                f" (ORCH_USER_MAX_QUEUED_BYTES), and take {size / 1e6:.1f} MB",
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
