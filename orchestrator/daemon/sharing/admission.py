"""Refuses a job if its queue does not exist, or if it could never start within a quota or limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.errors import RefusedError
from orchestrator.core.scheduler.queues import QueueTree
from orchestrator.spec.model import ElasticWorkers

if TYPE_CHECKING:
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.spec.job import JobSpec


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


def _least_ranks(spec: JobSpec) -> int:
    match spec.resources.num_workers:
        case ElasticWorkers() as elastic:
            return elastic.min
        case int(ranks):
            return ranks
        case _:  # auto: as advised, else the free GPUs at its start
            auto = spec.resources.auto
            return auto.bounds[0] if auto else 1
