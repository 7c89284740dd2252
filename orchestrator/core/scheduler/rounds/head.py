"""The jobs of a round that find too little free, those that stop for them, and those that run meanwhile. Pure."""

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
"""Maximum number of jobs that found too little free and are considered for time sharing in a round."""

_NOT_ASKED: Final = Plan()


class Head:
    """The first job of a round that finds too little free (``job``), and others behind it.

    Free resources are kept for a job that does not fit: at once from all jobs but its equals, the jobs of its queue and
    priority. What is kept from equals for a large gang stands idle until as many others have ended, and this costs
    small jobs more than the large one gains. The job claims free resources from its equals too if others stop for it
    already, if it is known by when the first job starts (``has_bounded_start``), and once it has waited for ``ageing``
    and no other lane comes before it, or for much longer (``claims_all``): as long as jobs of other users come first by
    their shares, claimed GPUs would only stand idle.
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
        """Record a job that finds too little free."""
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
        """Whether free resources are kept from all other jobs for one that does not fit."""
        sharing = self._round.shares.sharing
        if self._bounded or job.id in self._served or is_returning(job) or claims_all(job, sharing, self._now):
            return True
        return not self._shared and has_aged(job, sharing, self._now) and self._first_of_all(job)

    def _first_of_all(self, job: Job) -> bool:
        """Whether no other job may come before it, in this round or a later one, so that what it claims is never claimed in vain."""
        queue = self._round.queue
        return not isinstance(queue, WaitingOrder) or queue.first_of_all(job)

    def kept_from(self, job: Job | None) -> Sequence[Job]:
        """Return the jobs that do not fit yet, and that ``job`` may not delay because it is not their equal.

        With None, no job may delay them from now on.
        """
        first = self._passed_by[0] if self._passed_by else None
        if first is None or (job is not None and self._round.shares.tree.are_equals(first, job)):
            return ()
        passed_by, self._passed_by = self._passed_by, []
        self._claimed = True
        return passed_by

    def room(self) -> Room:
        """Return the jobs that must stop for the first waiting job."""
        if self.job is None:
            return Room()
        reclaim = Reclaim(self.job, self._round.shares, self._round.waiting)
        return make_room(self.job, self._round.holding, self._round.nodes, self._now, reclaim, saves=self._round.saves)

    def shrinks(self) -> tuple[Sequence[Job], Sequence[tuple[Job, int]]]:
        """Return the jobs that are shrinking for the first one, and those that shrink now with the ranks they keep."""
        head, round_ = self.job, self._round
        if head is None or not round_.holding.elastic:
            return (), ()
        if under_way := shrinking_for(head, round_.holding):
            return under_way, ()
        rule = Reclaim(head, round_.shares, round_.waiting)
        return (), shrink(head, round_.holding, round_.nodes, self._now, rule)

    def idle(self) -> Reclaimed | None:
        """Return the jobs that give idle GPUs to the first one; None if no job has idle ones."""
        head, round_ = self.job, self._round
        if head is None or not round_.idle:
            return None
        return reclaim_idle(head, round_.holding, round_.idle, round_.nodes, self._now, round_.shares.sharing)

    def moving(self) -> tuple[Job, ...]:
        """Return the jobs that are leaving their nodes for the first one."""
        return () if self.job is None else moving_for(self.job, self._round.holding)

    def moves(self) -> Plan | None:
        """Return the jobs that move for the first one, or why none does; None if moves are of no use, or off."""
        if self._plan is _NOT_ASKED:
            on = self.job is not None and self._round.shares.sharing.consolidate
            self._plan = consolidate(self.job, self._round, self._now) if on and self.job is not None else None
        return self._plan

    def stops(self) -> tuple[Job | None, Room, Fact | None]:
        """Return the job for which others stop, these, and why.

        It is the first job that finds too little free, else one that is expected to need less time than they do.
        """
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
        """Record that the round placed a job."""
        if self._backfill is not None:
            self._backfill.placed(job, where)

    def backfilled(self, job: Job) -> tuple[str, ...] | None:
        """Return the nodes for another job that ends before the first one can start.

        None if no nodes may be used, or if there is no first job yet.
        """
        if self._backfill is None or self.job is None:
            return None
        return self._backfill.place(job, self._now, self._reservation)

    def ask_again_at(self) -> float | None:
        """Return when another job may end before this one can start, even if nothing else changes."""
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
    """Return the ids of the jobs for which others are stopping, shrinking or moving."""
    leaving = (*holding.stopping.values(), *holding.moving.values(), *holding.elastic.values())
    by = (job.stop.by for job in leaving if job.stop is not None)
    return {one.job for one in by if isinstance(one, FOR_A_JOB)}
