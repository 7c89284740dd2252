"""Preemption: the running jobs that stop at a checkpoint so that the job at the head of the queue can start.

``Reclaim`` (reclaim.py) chooses the jobs that give way to another: those of lower priority, or in a queue that borrows.
A job does not give way if it has ``preemptible: false``, has not run for its ``min_runtime``, or was preempted often in
the last hour. Of the others, those that lose the least GPU time since their newest durable checkpoint are stopped, and
no more of them than are needed. A stop waits for a checkpoint that is due within a minute (service/saves.py). Nothing
is stopped if jobs that are ending anyway make enough room, or if no set of jobs would. A stopped job keeps its place in
the queue among those that are expected to need as much time.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.scheduler.placement import free_on, place, share_unknown
from orchestrator.core.scheduler.room.holding import Holding
from orchestrator.core.scheduler.service.saves import RECORDED, loss, worth_waiting
from orchestrator.core.states import AttemptState, JobState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.reclaim import Reclaim
    from orchestrator.core.scheduler.service.saves import Saves

WINDOW_SECONDS: Final = 3600.0
MOST_IN_A_WINDOW: Final = 4
"""A job that was preempted this often in the last hour is not preempted until the first of these was an hour ago."""


class Room(NamedTuple):
    """Jobs that stop now, that are stopping, and that stop ``later``, once they have saved; and when to ask again."""

    stop: tuple[Job, ...] = ()
    stopping: tuple[Job, ...] = ()
    ask_again_at: float | None = None
    later: tuple[Job, ...] = ()


def make_room(
    job: Job, jobs: Collection[Job], nodes: Mapping[str, Node], now: float, rule: Reclaim, saves: Saves = RECORDED
) -> Room:
    """Return the jobs that must stop for ``job``, which does not fit beside ``jobs``; ``rule`` says which may."""
    holding = jobs if isinstance(jobs, Holding) else Holding(jobs)
    stopping = tuple(sorted(holding.stopping.values(), key=lambda other: other.submission.sequence))
    if not stopping and not (
        any(rule.may_give_way(*rank) for rank in holding.ranks) and any(_gives_way(o, rule) for o in jobs)
    ):
        return Room()  # checked before free resources are counted: most often no job may be preempted
    staying = [other for other in jobs if other.gang_open and not ends_anyway(other)]
    if place(job, free_on(nodes.values(), staying), nodes) is not None or any(map(share_unknown, staying)):
        return Room(stopping=stopping)
    possible = [other for other in staying if _gives_way(other, rule)]
    due = {other.id: preemptible_at(other) for other in possible}
    cheapest = sorted((o for o in possible if due[o.id] <= now), key=lambda o: loss(o, now, saves))
    victims = fewest(job, rule.together(cheapest), staying, nodes)
    if victims:
        saving = [at for victim in victims if (at := worth_waiting(victim, now, saves)) is not None]
        return Room(ask_again_at=min(saving), later=victims) if saving else Room(stop=victims)
    later = [at for at in due.values() if at > now]
    return Room(ask_again_at=min(later, default=None))


def preemptible_at(job: Job) -> float:
    """Return from when on a running job may be preempted: after its ``min_runtime``, and not too often in an hour."""
    attempt = job.attempt
    at = 0.0
    if attempt is not None and attempt.running_at is not None and job.spec.min_runtime is not None:
        at = attempt.running_at + job.spec.min_runtime.total_seconds()
    preempted = [
        before.ended_at
        for before in job.attempts
        if before.state is AttemptState.PREEMPTED and before.ended_at is not None
    ]
    if len(preempted) >= MOST_IN_A_WINDOW:
        at = max(at, preempted[-MOST_IN_A_WINDOW] + WINDOW_SECONDS)
    return at


def _gives_way(job: Job, rule: Reclaim) -> bool:
    return job.state is JobState.RUNNING and job.spec.preemptible and not job.degraded and rule.gives_way(job)


def ends_anyway(job: Job) -> bool:
    """Whether the gang's resources become free without a further stop; a resized or moved job takes as much again."""
    if job.stop is not None:
        return not job.stop.purpose.returns
    return job.succeeded or job.state.is_terminal


def fewest(job: Job, candidates: Sequence[Job], staying: Sequence[Job], nodes: Mapping[str, Node]) -> tuple[Job, ...]:
    """Return the fewest first ``candidates`` without which the job fits, less those not needed, costliest first."""
    count = bisect_left(
        range(len(candidates)), x=True, key=lambda last: _fits_without(job, candidates[: last + 1], staying, nodes)
    )
    if count == len(candidates):
        return ()
    chosen = list(candidates[: count + 1])
    for candidate in chosen[-2::-1]:
        fewer = [other for other in chosen if other is not candidate]
        if _fits_without(job, fewer, staying, nodes):
            chosen = fewer
    return tuple(chosen)


def _fits_without(job: Job, gone: Iterable[Job], staying: Iterable[Job], nodes: Mapping[str, Node]) -> bool:
    """Whether the job fits beside those of ``staying`` that are not in ``gone``."""
    ids = {other.id for other in gone}
    return place(job, free_on(nodes.values(), [o for o in staying if o.id not in ids]), nodes) is not None
