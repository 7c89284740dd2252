"""Backfill: short jobs run on resources that the queue's head has claimed, if they end before it could start. Pure.

The *head* is the first job for which too little is free. Once it claims the free resources, no job behind it delays it.
Its *reservation* is the time at which it fits if running jobs end as expected (durations.py) and the jobs that the
decision has placed run on. A later job may use claimed resources if its ``max_duration``, which is enforced, ends it
before that time. So the head is delayed only if running jobs end earlier than expected, and at most by the limit of a
job that began before that.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.scheduler.durations import Basis
from orchestrator.core.scheduler.placement import place
from orchestrator.core.scheduler.reservations import ReservedNodes
from orchestrator.core.scheduler.resources import vacate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes
    from orchestrator.core.scheduler.live_jobs import LiveJobs
    from orchestrator.core.scheduler.resources import FreeNodes

End = tuple[float, int, "Job | None"]
"""When a job releases its gang, and its order of arrival; without a job, when a reservation of a node ends."""


class Reservation(NamedTuple):
    """The time ``at`` which the head fits. ``recedes``: this time moves later while the job that has to end runs on."""

    at: float
    recedes: bool = False


def expected_ends(jobs: LiveJobs, now: float, run_times: RunTimes) -> list[tuple[float, int, Job]]:
    """Return when jobs that hold gangs are expected to release them, in order; jobs without a forecast are left out."""
    found = []
    for job, clock, *_ in jobs.occupants():
        if clock.over_at is not None:
            found.append((max(now, clock.over_at), job.submission.sequence, job))
        elif (left := run_times.left_by(clock, job.id, now)) is not None:
            found.append((now + left.seconds, job.submission.sequence, job))
    return sorted(found, key=itemgetter(0, 1))


def reservation(
    head: Job, jobs: LiveJobs, free: FreeNodes, nodes: Mapping[str, Node], now: float, run_times: RunTimes
) -> Reservation | None:
    """Return when the head fits as jobs that hold gangs end; None if a job that has to end has no expected end."""
    found = _first_end(head, expected_ends(jobs, now, run_times), free, nodes)
    if found is None:
        return None
    at, _, job = found
    left = None if job is None or job.stop is not None else run_times.left(job, now)
    return Reservation(at, recedes=left is not None and left.basis is Basis.ELAPSED)


def has_bounded_start(head: Job, jobs: LiveJobs, free: FreeNodes, nodes: Mapping[str, Node], now: float) -> bool:
    """Whether the head fits once jobs reach ``max_duration`` and node reservations end, even if all else runs on."""
    limits = ((job, clock.limit_left(now)) for job, clock, *_ in jobs.occupants() if clock.limit is not None)
    ends = [(now + left, job.submission.sequence, job) for job, left in limits if left is not None]
    return _first_end(head, sorted(ends, key=itemgetter(0, 1)), free, nodes) is not None


def _first_end(
    head: Job, ends: Iterable[tuple[float, int, Job]], free: FreeNodes, nodes: Mapping[str, Node]
) -> End | None:
    """Return the first end of a job or of a node's reservation after which the head fits."""
    order: list[End] = list(ends)
    if isinstance(nodes, ReservedNodes):
        order = sorted([*order, *((at, -1, None) for at in nodes.ends())], key=itemgetter(0, 1))
    free.begin()
    try:
        for end in order:
            if end[2] is not None:
                vacate(end[2], free)
            if place(head, free, nodes, at=end[0]) is not None:
                return end
    finally:
        free.restore()
    return None
