"""Time sharing: a running job stops for a waiting one that is expected to need less time. Pure.

It is off unless ``Sharing.time_sharing`` is set. It is least attained service with preemption, bounded by what a stop
costs: a job stops only while it would repeat no more than ``Sharing.time_sharing`` seconds plus a tenth of the time
that the other has waited, so most often just after it has saved. It must have saved in its present attempt, so that
each attempt makes progress. It must be on a higher level (levels.py), in the same queue, of no higher priority, and of
the same user or of one with a larger share; ``preemptible``, ``min_runtime`` and the bound on preemptions in an hour
hold as for any preemption. One job is served at a time. For a job that has waited for so long that it claims what is
free (``claims_all``), neither levels nor shares count, and no other job is served before it: what runs then has soon
saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.scheduler.placement import (
    claim,
    free_on,
    give_back,
    known_shares,
    place,
    rank_size,
    share_unknown,
    take,
)
from orchestrator.core.scheduler.preemption import Room, preemptible_at
from orchestrator.core.scheduler.room.vacancy import Vacancy
from orchestrator.core.scheduler.service.levels import (
    AGED,
    LEVEL_SECONDS,
    claims_all,
    claims_all_at,
    level_of,
    running_level,
    waiting_since,
    work_of,
)
from orchestrator.core.scheduler.service.saves import loss, unsaved_seconds
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.core.scheduler.rounds.round import Round
    from orchestrator.core.scheduler.service.saves import Saves
    from orchestrator.core.scheduler.shares import Shares

REPEATED_SHARE: Final = 0.1
"""Fraction of a job's waiting time that each job stopped for it may repeat, beyond ``time_sharing``."""
MOST_STOPPED: Final = 128
"""A gang that needs more jobs to stop gets no room by time sharing."""


class _Able(NamedTuple):
    """A running job that may stop, its level, and the seconds that it would repeat."""

    job: Job
    level: int
    unsaved: float


def share_time(short: Sequence[Job], round_: Round, now: float, *, claimed: bool = False) -> tuple[Job | None, Room]:
    """Return the first waiting job of ``short`` for which others stop, and these; else None, and when to ask again.

    ``claimed``: jobs that do not fit have claimed resources, which the round no longer counts as free.
    """
    if not short or round_.holding.stopping:
        return None, Room()
    aged = [job for job in short if claims_all(job, round_.shares.sharing, now)]
    considered = aged or short
    levels = {job.id: AGED if aged else _waiting_level(job, round_) for job in considered}
    lowest = min(levels.values())
    able = [one for job in round_.holding if (one := _able(job, lowest, round_, now)) is not None]
    gives_way = _Rule(round_.shares)
    free, nodes = _unclaimed(round_) if claimed else round_.free, round_.nodes
    due = [at for job in short if (at := claims_all_at(job, round_.shares.sharing)) > now]
    for job in considered:
        there = [one for one in able if one.level > levels[job.id] and gives_way(one.job, job, aged=bool(aged))]
        bound = most_repeated(job, round_.shares.sharing, now)
        cheap = sorted((one.job for one in there if one.unsaved <= bound), key=lambda o: loss(o, now, round_.saves))
        free.begin()
        if claimed:
            _claim_before(job, short, free, round_)
        waits_for_a_claim = claimed and place(job, free, nodes) is not None
        victims = () if waits_for_a_claim else _enough(job, cheap, free, nodes)
        free.restore()
        if victims:
            return job, Room(stop=victims)
        saves = (round_.saves.next_at(one.job, now) for one in there if one.unsaved > bound)
        due += [at for at in saves if at is not None and at > now]
    due += _crossings(round_, lowest, now)
    return None, Room(ask_again_at=min(due, default=None))


def _unclaimed(round_: Round) -> Vacancy:
    return Vacancy(free_on(round_.nodes.values(), round_.holding), round_.free.topology)


def _claim_before(job: Job, short: Sequence[Job], free: Vacancy, round_: Round) -> None:
    """Claim what the job may not take, for those before it that are not its equals."""
    for other in short:
        if other is job:
            return
        if not round_.shares.tree.are_equals(other, job):
            claim(other, free, round_.nodes)


def most_repeated(job: Job, sharing: Sharing, now: float) -> float:
    """Return the seconds that each job that stops for a waiting one may repeat."""
    waited = max(0.0, now - waiting_since(job))
    return (sharing.time_sharing or 0.0) + REPEATED_SHARE * waited


def _waiting_level(job: Job, round_: Round) -> int:
    work = work_of(job, round_.run_times.likes())
    return level_of(work, job.submission.user, round_.run_times)


def _may_stop(job: Job, now: float, saves: Saves) -> bool:
    there = job.state is JobState.RUNNING and job.spec.preemptible and not job.degraded and not job.succeeded
    if not there or share_unknown(job) or preemptible_at(job) > now:
        return False
    began, saved = job.attempts[-1].running_at, saves.saved_at(job, now)
    return began is not None and saved is not None and saved >= began


def _able(job: Job, lowest: int, round_: Round, now: float) -> _Able | None:
    if not _may_stop(job, now, round_.saves):
        return None
    level = running_level(job, now, round_.run_times)
    return _Able(job, level, unsaved_seconds(job, now, round_.saves)) if level > lowest else None


def _crossings(round_: Round, lowest: int, now: float) -> list[float]:
    """Return when running jobs come above a level by running on."""
    if lowest == AGED:
        return []  # all are above it
    after = LEVEL_SECONDS * 2.0**lowest
    began = [job.attempts[-1].running_at for job in round_.holding if job.state is JobState.RUNNING]
    return [at + after + 1.0 for at in began if at is not None and at + after + 1.0 > now]


class _Rule:
    """Decides whether a running job gives way to a waiting one that is expected to need less time."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._known: dict[tuple[str, str], float] = {}

    def __call__(self, other: Job, job: Job, *, aged: bool) -> bool:
        tree = self._shares.tree
        queue = tree.queue_of(job)
        if tree.queue_of(other) != queue or other.priority > job.priority:
            return False
        if aged:
            return True
        user, others = job.submission.user, other.submission.user
        return user == others or self._share(queue, others) > self._share(queue, user)

    def _share(self, queue: str, user: str) -> float:
        if (queue, user) not in self._known:
            self._known[queue, user] = self._shares.user_share(queue, user)
        return self._known[queue, user]


def _enough(job: Job, candidates: Sequence[Job], free: Vacancy, nodes: Mapping[str, Node]) -> tuple[Job, ...]:
    """Return the first candidates without which the job fits, less those that are not needed, the costliest first."""
    there = [other for other in candidates if all(node in free for node in other.nodes)][:MOST_STOPPED]
    gpus = rank_size(job)[1] * job.size.least
    if sum(rank_size(other)[1] * len(other.nodes) for other in there) + free.sums()[0] < gpus:
        return ()
    free.begin()
    try:
        return _fewest(job, there, free, nodes)
    finally:
        free.restore()


def _fewest(job: Job, there: Sequence[Job], left: Vacancy, nodes: Mapping[str, Node]) -> tuple[Job, ...]:
    chosen: list[Job] = []
    for other in there:
        give_back(other, other.nodes, known_shares(other), left)
        chosen.append(other)
        if place(job, left, nodes) is not None:
            break
    else:
        return ()
    for other in chosen[-2::-1]:
        take(other, other.nodes, left, known_shares(other))
        if place(job, left, nodes) is None:
            give_back(other, other.nodes, known_shares(other), left)
        else:
            chosen.remove(other)
    return tuple(chosen)
