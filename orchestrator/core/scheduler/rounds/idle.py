"""Idle reclaim: a running job with GPUs that have all been idle for long gives way to one that does not fit. Pure.

It is off unless ``Sharing.reclaim_idle`` or the job's own ``reclaim_idle`` is set. The diagnosis finds what is idle
(findings ``job_idle`` and ``gpus_unused``). No more jobs are stopped than are needed, those that have been idle for the
longest first; an elastic job continues on its fewest ranks if that is enough. ``preemptible``, ``min_runtime`` and the
bound on preemptions in an hour hold as for any preemption. A stopped job starts again no sooner than after as long as
it may be idle, so that it does not take back what it has given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.facts.requesters import ByIdleReclaim, ByShrinking
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.scheduler.placement import free_on, place, share_unknown, take
from orchestrator.core.scheduler.preemption import ends_anyway, fewest, preemptible_at
from orchestrator.core.scheduler.room.topology import topology_of
from orchestrator.core.scheduler.room.vacancy import Vacancy
from orchestrator.core.states import JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.core.scheduler.room.holding import Holding


class Reclaimed(NamedTuple):
    """The idle jobs that stop, or the one that continues on its fewest ranks, the events, and when to ask again."""

    jobs: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    ask_again_at: float | None = None


def idle_limit(job: Job, sharing: Sharing) -> float | None:
    """Return how many seconds the job's GPUs may be idle while others wait; None: forever."""
    own = job.spec.reclaim_idle
    return sharing.reclaim_idle if own is None else own.total_seconds()


def reclaim_idle(
    head: Job, holding: Holding, idle: Mapping[JobId, float], nodes: Mapping[str, Node], now: float, sharing: Sharing
) -> Reclaimed:
    """Return the jobs that give way to ``head``, which does not fit; ``idle`` is since when jobs' GPUs are idle."""
    due: list[tuple[float, int, Job]] = []
    later: list[float] = []
    for job_id, since in idle.items():
        job = holding.by_id.get(job_id)
        limit = None if job is None else idle_limit(job, sharing)
        if job is None or limit is None or not _may_stop(job):
            continue
        at = max(since + limit, preemptible_at(job))
        if at <= now:
            due.append((since, job.submission.sequence, job))
        else:
            later.append(at)
    ask_again_at = min(later, default=None)
    candidates = [job for _, _, job in sorted(due, key=lambda entry: entry[:2])]
    staying = [other for other in holding if other.gang_open and not ends_anyway(other)]
    if not candidates or any(map(share_unknown, staying)):
        return Reclaimed(ask_again_at=ask_again_at)
    if place(head, free_on(nodes.values(), staying), nodes) is not None:
        return Reclaimed(ask_again_at=ask_again_at)  # what ends anyway is enough
    for job in candidates:
        if job.elastic is not None and _fits_beside_fewest(head, job, staying, nodes):
            less = ByShrinking(job=head.id, ranks=job.size.least, instead_of=job.num_workers)
            return Reclaimed((job.id,), tuple(request_stop(job, StopPurpose.RESIZE, less, now)), ask_again_at)
    chosen = fewest(head, candidates, staying, nodes)
    events: list[Event] = []
    for job in chosen:
        by = ByIdleReclaim(job=head.id, seconds=idle_limit(job, sharing) or 0.0)
        events += request_stop(job, StopPurpose.PREEMPT, by, now)
    return Reclaimed(tuple(job.id for job in chosen), tuple(events), ask_again_at)


def _may_stop(job: Job) -> bool:
    running = job.state is JobState.RUNNING and job.stop is None and not job.succeeded
    return running and job.spec.preemptible and not job.degraded and not job.gang_lost


def _fits_beside_fewest(head: Job, job: Job, staying: Sequence[Job], nodes: Mapping[str, Node]) -> bool:
    if job.num_workers <= job.size.least:
        return False
    others = [other for other in staying if other is not job]
    free = Vacancy(free_on(nodes.values(), others), topology_of(nodes.values()))
    where = place(job, free, nodes)
    if where is None:
        return False
    take(job, where, free)
    return place(head, free, nodes) is not None
