"""Backfill: short jobs run on resources that the queue's head has claimed, if they end before it could start. Pure.

The *head* is the first job for which too little is free. Once it claims the free resources (rounds/head.py), no job
behind it delays it. Its *reservation* is the time at which it fits if running jobs end as expected (durations.py) and
the jobs that the round has placed run on. A later job may use claimed resources if its ``max_duration``, which is
enforced, ends it before that time. So the head is delayed only if running jobs end earlier than expected, and at most
by the limit of a job that began before that.

Nothing is backfilled while jobs stop to make room for the head, or may be stopped for it.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.scheduler.durations import Basis, limit_left
from orchestrator.core.scheduler.placement import give_back, known_shares, place, take
from orchestrator.core.scheduler.room.timetable import Timetable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes
    from orchestrator.core.scheduler.room.holding import Holding
    from orchestrator.core.scheduler.room.vacancy import Vacancy


SOONEST: Final = 1.0


class Reservation(NamedTuple):
    """The time ``at`` which the head fits. ``recedes``: this time moves later while the job that has to end runs on."""

    at: float
    recedes: bool = False


class Backfill:
    """Places jobs on free resources, claimed ones included, until the head's reservation.

    ``free`` is what is free before the round.
    """

    def __init__(self, free: Vacancy, nodes: Mapping[str, Node]) -> None:
        self._free = free
        self._nodes = nodes
        self._reserved: Reservation | None = None
        self._known = False
        self.ask_again_at: float | None = None

    def placed(self, job: Job, where: Sequence[str]) -> None:
        """Record that the round placed a job."""
        take(job, where, self._free)

    def place(
        self, job: Job, now: float, reservation: Callable[[Vacancy], Reservation | None]
    ) -> tuple[str, ...] | None:
        """Return the nodes for a job that ends before the head's reservation; None if it has to wait.

        ``reservation`` is called once, when it is first needed.
        """
        limit = limit_left(job, now)
        if limit is None:
            return None
        found = place(job, self._free, self._nodes)
        if found is None:
            return None
        if not self._known:
            self._reserved, self._known = reservation(self._free), True
        reserved = self._reserved
        if reserved is None or now + limit <= reserved.at:
            return None if reserved is None else found
        if reserved.recedes:
            due = max(now + SOONEST, now + limit - (reserved.at - now))
            self.ask_again_at = due if self.ask_again_at is None else min(due, self.ask_again_at)
        return None


def reservation(
    head: Job,
    holding: Holding,
    free: Vacancy,
    nodes: Mapping[str, Node],
    now: float,
    run_times: RunTimes,
) -> Reservation | None:
    """Return when the head fits as jobs that hold gangs end; None if a job that has to end has no expected end."""
    free.begin()
    try:
        for at, job in _openings(holding, nodes, now, run_times):
            if job is None:
                if place(head, free, nodes, at=at) is not None:
                    return Reservation(at)
                continue
            _vacate(job, free)
            if place(head, free, nodes, at=at) is not None:
                basis = run_times.left(job, now)
                return Reservation(at, recedes=basis is not None and basis.basis is Basis.ELAPSED and job.stop is None)
    finally:
        free.restore()
    return None


def has_bounded_start(head: Job, holding: Holding, free: Vacancy, nodes: Mapping[str, Node], now: float) -> bool:
    """Whether the head fits once jobs reach ``max_duration`` and node reservations end, even if all else runs on."""
    free.begin()
    try:
        if isinstance(nodes, Timetable):
            return _fits_at_an_end(head, holding, free, nodes, now)
        return bool(holding.limited) and _fits_without(head, holding.limited.values(), free, nodes)
    finally:
        free.restore()


def _fits_without(head: Job, jobs: Iterable[Job], free: Vacancy, nodes: Mapping[str, Node]) -> bool:
    """Whether the head fits once all of ``jobs`` have ended; tried after 16, 64, 256, ...: some are often enough."""
    due = 16
    for number, job in enumerate(jobs, 1):
        _vacate(job, free)
        if number == due:
            if place(head, free, nodes) is not None:
                return True
            due *= 4
    return place(head, free, nodes) is not None


def _fits_at_an_end(head: Job, holding: Holding, free: Vacancy, nodes: Timetable, now: float) -> bool:
    """Whether the head fits when a limited job or a node reservation ends: the nodes open to it depend on the time."""
    found: list[tuple[float, int, Job | None]] = [(at, -1, None) for at in nodes.ends()]
    for limited, clock in holding.clocks():
        if (left := clock.limit_left(now)) is not None:
            found.append((now + left, limited.submission.sequence, limited))
    for at, _, job in sorted(found, key=lambda entry: entry[:2]):
        if job is not None:
            _vacate(job, free)
        if place(head, free, nodes, at=at) is not None:
            return True
    return False


def _vacate(job: Job, free: Vacancy) -> None:
    """Give back what a job holds on the nodes that accept new ranks."""
    there = [(n, s) for n, s in zip(job.nodes, known_shares(job), strict=True) if n in free]
    give_back(job, [n for n, _ in there], [s for _, s in there], free)


def _openings(
    holding: Holding, nodes: Mapping[str, Node], now: float, run_times: RunTimes
) -> list[tuple[float, Job | None]]:
    """Return the times at which jobs release their gangs and at which node reservations end (with None), in order."""
    found: list[tuple[float, Job | None]] = [(at, job) for at, _, job in ends(holding, now, run_times)]
    if isinstance(nodes, Timetable):
        found += [(at, None) for at in nodes.ends()]
        found.sort(key=lambda entry: entry[0])
    return found


def ends(holding: Holding, now: float, run_times: RunTimes) -> list[tuple[float, int, Job]]:
    """Return when jobs that hold gangs are expected to release them, in order; jobs without a forecast are left out."""
    found = []
    for job, clock in holding.clocks():
        if clock.over_at is not None:
            found.append((max(now, clock.over_at), job.submission.sequence, job))
        elif (left := run_times.left_by(clock, job.id, now)) is not None:
            found.append((now + left.seconds, job.submission.sequence, job))
    found.sort(key=itemgetter(0, 1))
    return found
