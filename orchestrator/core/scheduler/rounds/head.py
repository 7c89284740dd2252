"""The jobs of a round that find too little free: who stops for them, and what runs until they can start. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.moves import ByConsolidation
from orchestrator.core.facts.requesters import ByIdleReclaim, ByPreemption, ByShrinking, ByTimeSharing
from orchestrator.core.lifecycle.advance import is_returning
from orchestrator.core.scheduler.backfill import Backfill, Reservation, has_bounded_start, reservation
from orchestrator.core.scheduler.order import WaitingOrder
from orchestrator.core.scheduler.preemption import Room, make_room
from orchestrator.core.scheduler.reclaim import Reclaim
from orchestrator.core.scheduler.rounds.consolidation import Plan, consolidate, moving_for
from orchestrator.core.scheduler.rounds.idle import Reclaimed, reclaim_idle
from orchestrator.core.scheduler.rounds.shrinking import shrink, shrinking_for
from orchestrator.core.scheduler.rounds.time_sharing import share_time
from orchestrator.core.scheduler.service.levels import claims_all, has_aged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.room.holding import Holding
    from orchestrator.core.scheduler.room.vacancy import Vacancy
    from orchestrator.core.scheduler.rounds.round import Round

FOR_A_JOB: Final = (ByPreemption, ByTimeSharing, ByIdleReclaim, ByShrinking, ByConsolidation)
"""Requesters of stops that make room for a job."""
MOST_SHORT: Final = 32
"""So many jobs that found too little are considered for time sharing in a round."""

_NOT_ASKED: Final = Plan()


class Head:
    """The first job of a round that finds too little free (``job``), and others behind it.

    What is free is kept for a job that does not fit, but not at once from its equals, the jobs of its queue and priority: what is kept
    for a large gang stands idle until as many others have ended, and this costs small jobs more than the large one gains. It claims what is free
    from these too where others stop for it already, where it is known by when the first job starts (``has_bounded_start``), and once it has waited
    for ``ageing`` and no other lane comes before it, or for much longer (``claims_all``): as long as jobs of other users come first by their shares,
    claimed GPUs would only stand idle. From all others it is kept at once.
    """

    def __init__(self, round_: Round, now: float) -> None:
        self.job: Job | None = None
        self._short: list[Job] = []
        self._round = round_
        self._now = now
        self.nodes = round_.nodes
        self._plan: Plan | None = _NOT_ASKED
        self._backfill = None if round_.loose is None else Backfill(round_.loose, round_.nodes)
        self._shared = round_.shares.sharing.time_sharing is not None
        self._served = _served(round_.holding)
        self._passed_by: list[Job] = []
        self._claimed = False
        self._bounded = False

    def falls_short(self, job: Job) -> None:
        """A job finds too little free."""
        round_ = self._round
        if self.job is None:
            self.job = job
            self._bounded = not self._shared and has_bounded_start(
                job, round_.holding, round_.free, self.nodes, self._now
            )
        if self._shared and len(self._short) < MOST_SHORT:
            self._short.append(job)
        if self.claims(job):
            self._claimed = True
        else:
            self._passed_by.append(job)

    def claims(self, job: Job) -> bool:
        """Whether what is free is kept from all others for a job that does not fit."""
        sharing = self._round.shares.sharing
        if self._bounded or job.id in self._served or is_returning(job) or claims_all(job, sharing, self._now):
            return True
        return not self._shared and has_aged(job, sharing, self._now) and self._first_of_all(job)

    def _first_of_all(self, job: Job) -> bool:
        """Whether no other job may come before it, in this round or a later one, so that what it claims is never claimed in vain."""
        queue = self._round.queue
        return not isinstance(queue, WaitingOrder) or queue.first_of_all(job)

    def kept_from(self, job: Job | None) -> Sequence[Job]:
        """Jobs that do not fit yet, and that a job may not delay because it is not their equal; None: no job may from now on."""
        first = self._passed_by[0] if self._passed_by else None
        if first is None or (job is not None and self._round.shares.tree.are_equals(first, job)):
            return ()
        passed_by, self._passed_by = self._passed_by, []
        self._claimed = True
        return passed_by

    def room(self) -> Room:
        """Who stops for the first one."""
        if self.job is None:
            return Room()
        reclaim = Reclaim(self.job, self._round.shares, self._round.waiting)
        return make_room(self.job, self._round.holding, self._round.nodes, self._now, reclaim, saves=self._round.saves)

    def shrinks(self) -> tuple[Sequence[Job], Sequence[tuple[Job, int]]]:
        """The jobs that are shrinking for the first one, and those that shrink now, with the ranks that each is left."""
        head, round_ = self.job, self._round
        if head is None or not round_.holding.elastic:
            return (), ()
        if under_way := shrinking_for(head, round_.holding):
            return under_way, ()
        rule = Reclaim(head, round_.shares, round_.waiting)
        return (), shrink(head, round_.holding, round_.nodes, self._now, rule)

    def idle(self) -> Reclaimed | None:
        """The jobs that give idle GPUs to the first one; None where no job's are idle."""
        head, round_ = self.job, self._round
        if head is None or not round_.idle:
            return None
        return reclaim_idle(head, round_.holding, round_.idle, round_.nodes, self._now, round_.shares.sharing)

    def moving(self) -> tuple[Job, ...]:
        """The jobs that are leaving their nodes for the first one."""
        return () if self.job is None else moving_for(self.job, self._round.holding)

    def moves(self) -> Plan | None:
        """The jobs that move for the first one, or why none does; None where that would be of no use, or is off."""
        if self._plan is _NOT_ASKED:
            on = self.job is not None and self._round.shares.sharing.consolidate
            self._plan = consolidate(self.job, self._round, self._now) if on and self.job is not None else None
        return self._plan

    def stops(self) -> tuple[Job | None, Room, Fact | None]:
        """Who stops, for which job, and why: for the first one, else for one that is expected to need less time."""
        head = self.job
        room = self.room()
        if head is None or room.stop or room.stopping or not self._shared:
            return head, room, None if head is None else ByPreemption(job=head.id, priority=head.priority)
        job, shared = share_time(self._short, self._round, self._now, claimed=self._claimed)
        due = [at for at in (room.ask_again_at, shared.ask_again_at) if at is not None]
        if job is None:
            return None, shared._replace(ask_again_at=min(due, default=None)), None
        by = ByTimeSharing(job=job.id, overdue=claims_all(job, self._round.shares.sharing, self._now))
        return job, shared._replace(ask_again_at=min(due, default=None)), by

    def placed(self, job: Job, where: tuple[str, ...]) -> None:
        """The round placed a job."""
        if self._backfill is not None:
            self._backfill.placed(job, where)

    def backfilled(self, job: Job) -> tuple[str, ...] | None:
        """Where another job goes that ends before this one can start; None where none may, or before there is one."""
        if self._backfill is None or self.job is None:
            return None
        return self._backfill.place(job, self._now, self._reservation)

    def ask_again_at(self) -> float | None:
        """When another job may end before this one can start, though nothing else changes."""
        return None if self._backfill is None else self._backfill.ask_again_at

    def _reservation(self, free: Vacancy) -> Reservation | None:
        room, round_ = self.room(), self._round
        if self.job is None or room.stop or room.stopping or self.moving():
            return None
        plan = self.moves()
        if plan is not None and plan.under_way:
            return None if plan.wait_until is None else Reservation(plan.wait_until)
        found = reservation(self.job, round_.holding, free, round_.nodes, self._now, round_.run_times)
        due = room.ask_again_at
        return Reservation(due) if due is not None and (found is None or due < found.at) else found


def _served(holding: Holding) -> set[str]:
    """The jobs for which others are stopping, shrinking or moving."""
    leaving = (*holding.stopping.values(), *holding.moving.values(), *holding.elastic.values())
    by = (job.stop.by for job in leaving if job.stop is not None)
    return {one.job for one in by if isinstance(one, FOR_A_JOB)}
