"""Decides how many ranks an elastic job gets, and when that changes. Pure.

An elastic job (``num_workers: {min: 2, max: 8}``) starts on what other jobs leave: every waiting job first gets what it
needs, elastic jobs their ``min``; the rest goes to the elastic ones, in the queue's order, up to ``max``. After a loss
of ranks it continues on as many as fit, again at least ``min``. It grows at a checkpoint:

- only into what is left when every waiting job, also one in its back-off, has claimed what it needs: growing delays no
  job;
- not before its attempt has run for ``grow_after`` (five minutes by default), however often GPUs become free: a stop
  and a start cost seconds, so resizing takes less than a hundredth of the time;
- only when the attempt has saved a checkpoint, and within FRESH_SECONDS of one, so that even a script that does not
  save when it is asked to stop repeats almost nothing.

It also shrinks at a checkpoint, if the first job that finds too little free would then fit (preemption.py).
``auto`` is not elastic: the number of ranks is fixed at the first start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import ByShrinking
from orchestrator.core.lifecycle.advance import is_returning
from orchestrator.core.scheduler.placement import capacity, give_back, known_shares, place, share_unknown, take
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.placement import FreeNodes

FRESH_SECONDS = 30.0
"""A checkpoint at most this old permits stopping a job that grows."""


def first_place(job: Job, free: FreeNodes, nodes: Mapping[str, Node]) -> tuple[str, ...] | None:
    """Return the nodes of the job's gang before any job gets more ranks than it needs; None if it does not fit.

    A resized job gets the ranks that it had or was left with, if they fit.
    """
    if is_returning(job):
        found = place(job, free, nodes, ranks=_wanted(job))
        if found is not None:
            return found
    return place(job, free, nodes)


def _wanted(job: Job) -> int:
    """Return the ranks that a resized job gets before any other job: what shrinking left it, else what it had."""
    by = job.stop.by if job.stop is not None else None
    return by.ranks if isinstance(by, ByShrinking) else job.num_workers


def extend(
    job: Job,
    placed: tuple[str, ...],
    shares: tuple[str | None, ...],
    free: FreeNodes,
    nodes: Mapping[str, Node],
    most: int,
) -> tuple[str, ...]:
    """Return ``placed``, or a larger gang of at most ``most`` ranks if ``free`` has space; ``free`` is then the rest.

    ``shares`` is what ``take`` returned for ``placed``.
    """
    if len(placed) >= most:
        return placed
    give_back(job, placed, shares, free)
    larger = place(job, free, nodes, ranks=min(most, capacity(job, free, nodes)))
    chosen = larger if larger is not None and len(larger) > len(placed) else placed
    take(job, chosen, free)
    return chosen


def growth_due(job: Job, now: float) -> bool | float:
    """Return True if the job may be stopped now to grow, a time to ask again, or False until its record changes."""
    return job.num_workers < job.size.most and _resize_due(job, now)


def may_shrink(job: Job, now: float) -> bool:
    """Return whether the job may be stopped now to continue on fewer ranks."""
    return job.num_workers > job.size.least and _resize_due(job, now) is True


def _resize_due(job: Job, now: float) -> bool | float:
    attempt = job.attempt
    if job.state is not JobState.RUNNING or job.elastic is None or attempt is None or attempt.running_at is None:
        return False
    if job.stop is not None or job.gang_lost or job.degraded or job.exits or job.succeeded:
        return False
    if attempt.checkpoint_step <= attempt.start_step:
        return False
    if job.checkpoints.at is None or now > job.checkpoints.at + FRESH_SECONDS:
        return False  # asked again after the next checkpoint
    due_at = attempt.running_at + job.elastic.grow_after.total_seconds()
    return True if now >= due_at else due_at


def grown_size(job: Job, free: FreeNodes, nodes: Mapping[str, Node], most: int) -> int:
    """Return how many ranks the job could have if it released what it holds; its own number when no more fit.

    The result is at most ``most``. What the job would get is taken from ``free``.
    """
    if share_unknown(job) or not all(node_id in free for node_id in job.nodes):
        return job.num_workers  # a node accepts no new ranks: the job might not get its place again
    give_back(job, job.nodes, known_shares(job), free)
    larger = place(job, free, nodes, ranks=min(most, capacity(job, free, nodes)))
    if larger is None or len(larger) <= job.num_workers:
        take(job, job.nodes, free, known_shares(job))
        return job.num_workers
    take(job, larger, free)
    return len(larger)
