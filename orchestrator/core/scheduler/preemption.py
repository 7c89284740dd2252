"""The running jobs that stop, or shrink, so that a waiting job can start. Pure.

What costs least comes first: elastic jobs shrink, idle GPUs are taken back, jobs of lower priority or on borrowed GPUs
stop (``Reclaim``), and at last jobs that are expected to need more time (time sharing). No job stops that has
``preemptible: false``, has not run for its ``min_runtime``, or was preempted often in the last hour. Of the others those
that lose the least GPU time since their newest checkpoint on storage stop, and no more of them than are needed. Nothing
stops if jobs that are ending anyway make enough room, or if no set of jobs would.

*Time sharing* stops only jobs that have saved in their present attempt, each within ``REPEATED_SECONDS`` of a save. So
each attempt makes progress, and no more work than that is repeated. The waiting job must be in the same queue, of at
least the same priority, on a lower level, and of the same user or of one with a smaller share; once it has waited for
ten times ``ageing``, levels and shares do not count. Jobs that it needs stop one after the other, each when it has saved.
Meanwhile what they leave is kept for the waiting job, so no job begins to stop unless all that it needs are due to save.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from orchestrator.core.cluster import EPSILON
from orchestrator.core.facts.reasons import ByIdleReclaim, ByShrinking
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.scheduler.durations import LEVEL_SECONDS, claims_at, running_level
from orchestrator.core.scheduler.elastic import may_shrink
from orchestrator.core.scheduler.live_jobs import occupant_of
from orchestrator.core.scheduler.order import AGED, group_of
from orchestrator.core.scheduler.placement import (
    give_back,
    occupy,
    place,
    rank_size,
    take,
    vacate,
)
from orchestrator.core.scheduler.shares import fair_shares
from orchestrator.core.states import StopPurpose

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes
    from orchestrator.core.scheduler.live_jobs import LiveJobs
    from orchestrator.core.scheduler.placement import FreeNodes
    from orchestrator.core.scheduler.shares import Shares

IMMINENT_SECONDS: Final = 60.0
"""A stop waits for no checkpoint that is due later than this."""
LATE_SHARE: Final = 0.1
LATE_SECONDS: Final = 10.0
"""A checkpoint is late after ``LATE_SHARE`` of the interval between the last two, and after ``LATE_SECONDS`` at most."""
REPEATED_SECONDS: Final = 60.0
"""Work that a job which stops by time sharing may repeat at most."""
DUE_SECONDS: Final = 3600.0
"""Time sharing waits for no checkpoint that is due later than this."""


class Saves(Protocol):
    """Times at which a running job has saved on storage, and is expected to."""

    def saved_at(self, job: Job, now: float) -> float | None:
        """Return when its newest checkpoint was saved; None without one."""

    def next_at(self, job: Job, now: float) -> float | None:
        """Return by when its next one is expected; None where that is not known."""


class RecordedSaves:
    """Times of checkpoints from the jobs' records. The interval between the last two is expected to pass again."""

    def saved_at(self, job: Job, now: float) -> float | None:  # noqa: ARG002 - the protocol's
        """Return when the newest on storage was saved."""
        return job.checkpoints.durable_at

    def next_at(self, job: Job, now: float) -> float | None:  # noqa: ARG002 - the protocol's
        """Return by when the present attempt is expected to save the next one; None if it has not saved yet."""
        at, every = job.checkpoints.durable_at, job.checkpoints.durable_every
        began = job.attempts[-1].running_at if job.attempts else None
        if at is None or began is None or at < began:
            return None
        every = at - began if every is None else every
        return at + every + min(LATE_SECONDS, LATE_SHARE * every)


RECORDED: Final = RecordedSaves()


class PreemptionPlan(NamedTuple):
    """Jobs that stop now, that are stopping, and that stop ``later``, once they have saved; and when to ask again."""

    stop: tuple[Job, ...] = ()
    stopping: tuple[Job, ...] = ()
    ask_again_at: float | None = None
    later: tuple[Job, ...] = ()


class SharingPlan(NamedTuple):
    """Jobs that make room for a waiting one by time sharing, those that stop now, and by when all have stopped."""

    jobs: tuple[Job, ...]
    stop: tuple[Job, ...]
    at: float
    ask_again_at: float | None = None


class _Candidate(NamedTuple):
    """A job that time sharing may stop, and when; ``since`` is its present time less the time that it has run."""

    at: float
    loss: tuple[float, float, int]
    level: int
    since: float
    job: Job


def unsaved_seconds(job: Job, now: float, saves: Saves = RECORDED) -> float:
    """Return the seconds that a job repeats at most if it stops now."""
    began = job.attempts[-1].running_at if job.attempts else None
    return max(0.0, now - max(now if began is None else began, saves.saved_at(job, now) or 0.0))


def loss(job: Job, now: float, saves: Saves = RECORDED) -> tuple[float, float, int]:
    """Return the GPU and CPU seconds since the newest checkpoint, which a stop costs at most; then the job's age."""
    seconds = unsaved_seconds(job, now, saves)
    cpus, gpus, _ = rank_size(job)
    return job.num_workers * gpus * seconds, job.num_workers * cpus * seconds, -job.submission.sequence


def worth_waiting(job: Job, now: float, saves: Saves = RECORDED) -> float | None:
    """Return when the job will have saved, if a stop must wait for that; else None.

    It must if the checkpoint is due within ``IMMINENT_SECONDS``, and sooner than the job has been without one.
    """
    at = saves.next_at(job, now)
    if at is None or not now < at <= now + IMMINENT_SECONDS or at - now >= unsaved_seconds(job, now, saves):
        return None
    return at


def idle_limit(job: Job, idle_seconds: float | None) -> float | None:
    """Return how many seconds the job's GPUs may be idle while others wait; None: forever."""
    own = job.spec.reclaim_idle
    return idle_seconds if own is None else own.total_seconds()


class Reclaim:
    """Selects the jobs that give way to one job. ``waiting`` are the queues of all jobs that wait.

    Without queues, a job gives way to every one of higher priority. With queues, priorities count only inside a queue.
    Between queues GPUs are *reclaimed*: for a queue that stays within its guarantee with the job, from a queue that
    holds more than its fair share, and only while it still does. If more is guaranteed than the cluster has, a guarantee
    counts only up to the queue's fair share. So a reclaim never raises a queue above its fair share at a sibling's
    expense.
    """

    def __init__(self, job: Job, shares: Shares, waiting: Collection[str]) -> None:
        self._job = job
        self._shares = shares
        self._queue = shares.tree.queue_of(job)
        self._gpus = rank_size(job)[1] * job.size.least
        self._fair = fair_shares(shares, set(waiting)) if shares.tree.configured else {}

    def gives_way(self, other: Job) -> bool:
        """Whether ``other`` may be stopped if no other job is."""
        if self._shares.tree.queue_of(other) == self._queue:
            return other.priority < self._job.priority
        return self._reclaims(other, {})

    def shrinks(self, other: Job) -> bool:
        """Whether an elastic job gives back what it has beyond its smallest size."""
        same = self._shares.tree.queue_of(other) == self._queue
        return other.priority <= self._job.priority if same else self.gives_way(other)

    def together(self, candidates: Sequence[Job]) -> list[Job]:
        """Return the candidates that may be stopped all together, or any of them; earlier ones are preferred."""
        taken: dict[str, float] = {}
        found = []
        for other in candidates:
            queue = self._shares.tree.queue_of(other)
            if queue == self._queue or self._reclaims(other, taken):
                found.append(other)
                for each in self._shares.tree.path(queue) if queue != self._queue else ():
                    taken[each.name] = taken.get(each.name, 0.0) + rank_size(other)[1] * len(other.nodes)
        return found

    def _reclaims(self, other: Job, taken: Mapping[str, float]) -> bool:
        """Whether the job's queue may take GPUs from the queue of ``other``.

        Of the first queues in which the two paths differ, the job's must stay within its guarantee with the
        job, and that of ``other``, less ``taken``, must exceed its fair share.
        """
        if self._gpus <= 0 or rank_size(other)[1] <= 0:
            return False
        ours = self._shares.tree.path(self._queue)
        theirs = self._shares.tree.path(self._shares.tree.queue_of(other))
        pairs = zip(ours, theirs, strict=False)
        mine, its = next(((a, b) for a, b in pairs if a.name != b.name), (None, None))
        if mine is None or its is None:
            return False
        guaranteed = min(self._shares.tree.guaranteed.get(mine.name, 0), self._fair.get(mine.name, 0.0))
        if self._shares.held_gpus(mine.name) + self._gpus > guaranteed + EPSILON:
            return False
        left = self._shares.held_gpus(its.name) - taken.get(its.name, 0.0)
        return left > self._fair.get(its.name, 0.0) + EPSILON


class Preemption:
    """Finds the jobs that make room, at ``now``. ``free`` is what jobs leave, without what others have claimed."""

    def __init__(
        self,
        jobs: LiveJobs,
        free: FreeNodes,
        nodes: Mapping[str, Node],
        shares: Shares,
        run_times: RunTimes,
        now: float,
        *,
        waiting: Collection[str] = (),
        saves: Saves = RECORDED,
    ) -> None:
        self._jobs = jobs
        self._free = free
        self._nodes = nodes
        self._shares = shares
        self._run_times = run_times
        self._now = now
        self._waiting = waiting
        self._saves = saves
        self._ending = [one.job for one in jobs.occupants() if one.ends]
        self._unknown = any(one.unknown for one in jobs.occupants())
        self._found: list[_Candidate] | None = None
        self.due: list[float] = []

    @contextmanager
    def _trial(self) -> Iterator[FreeNodes]:
        """Yield what is free once the jobs that end anyway have ended, and undo changes of it."""
        self._free.begin()
        for job in self._ending:
            vacate(job, self._free)
        try:
            yield self._free
        finally:
            self._free.restore()

    def room(self, job: Job) -> PreemptionPlan:
        """Return the jobs of lower priority, or on borrowed GPUs, that must stop for ``job``, which does not fit."""
        preempted = (one for one in self._ending if one.stop is not None and one.stop.purpose is StopPurpose.PREEMPT)
        stopping = tuple(sorted(preempted, key=lambda other: other.submission.sequence))
        rule = Reclaim(job, self._shares, self._waiting)
        stops = ((one.job, one.stops_at) for one in self._jobs.occupants() if one.stops_at is not None)
        able = [(other, at) for other, at in stops if rule.gives_way(other)]
        if not able and not self._ending:
            return PreemptionPlan()
        with self._trial() as free:
            if place(job, free, self._nodes) is not None or self._unknown:
                return PreemptionPlan(stopping=stopping)
            cheapest = sorted((o for o, at in able if at <= self._now), key=lambda o: loss(o, self._now, self._saves))
            victims = self._fewest(job, rule.together(cheapest), free)
        if victims:
            saving = [at for one in victims if (at := worth_waiting(one, self._now, self._saves)) is not None]
            return PreemptionPlan(ask_again_at=min(saving), later=victims) if saving else PreemptionPlan(stop=victims)
        return PreemptionPlan(ask_again_at=min((at for _, at in able if at > self._now), default=None))

    def turn(self, job: Job) -> SharingPlan | None:
        """Return the jobs that stop for ``job`` by time sharing; None if no set of jobs that are due to save makes room."""
        aged = claims_at(job, self._shares.sharing.ageing) <= self._now
        group = self._jobs.waiting.group(job.id) or group_of(job, ())
        level = AGED if aged else group.level(self._run_times)
        queue = self._shares.tree.queue_of(job)
        share = self._shares.user_share(queue, job.submission.user)
        smaller: dict[str, bool] = {job.submission.user: True}
        there = []
        for one in self._candidates():
            other, user = one.job, one.job.submission.user
            if one.level <= level:  # until it has run for longer
                self.due.append(one.since + LEVEL_SECONDS * 2.0 ** (level + 1))
                continue
            if other.priority > job.priority or self._shares.tree.queue_of(other) != queue:
                continue
            if user not in smaller:
                smaller[user] = aged or self._shares.user_share(queue, user) > share
            if smaller[user]:
                there.append(one)
        if place(job, self._free, self._nodes) is not None:
            return None  # it waits only for what another has claimed
        with self._trial() as free:
            if place(job, free, self._nodes) is not None:
                return SharingPlan((), (), self._now)
            if self._unknown:
                return None
            order = sorted(there, key=lambda one: one[:2])
            chosen = self._fewest(job, [one.job for one in order], free)
        if not chosen:
            return None
        times = {one.job.id: one.at for one in order}
        later = [times[one.id] for one in chosen if times[one.id] > self._now]
        stop = tuple(one for one in chosen if times[one.id] <= self._now)
        return SharingPlan(chosen, stop, max(later, default=self._now), min(later, default=None))

    def idle(
        self, head: Job, idle: Mapping[JobId, float], idle_seconds: float | None
    ) -> tuple[list[Event], float | None]:
        """Return the events by which idle jobs give way to ``head``, which does not fit, and when to ask again.

        ``idle`` is since when all GPUs of jobs are idle. Those that have been idle for the longest stop first; an
        elastic job continues on its fewest ranks if that is enough.
        """
        due: list[tuple[float, int, Job, float]] = []
        later: list[float] = []
        for job_id, since in idle.items():
            job = self._jobs.holding.get(job_id)
            limit = None if job is None else idle_limit(job, idle_seconds)
            stops_at = None if job is None or job.gang_lost else occupant_of(job).stops_at
            if job is not None and stops_at is not None and limit is not None:
                at = max(since + limit, stops_at)
                if at <= self._now:
                    due.append((since, job.submission.sequence, job, limit))
                else:
                    later.append(at)
        ask_again_at = min(later, default=None)
        with self._trial() as free:
            if not due or self._unknown or place(head, free, self._nodes) is not None:  # what ends anyway is enough
                return [], ask_again_at
            due.sort(key=lambda one: one[:2])
            for _, _, job, _ in due:
                if job.elastic is not None and self._fits_beside_fewest(head, job, free):
                    less = ByShrinking(job=head.id, ranks=job.size.least, instead_of=job.num_workers)
                    return request_stop(job, StopPurpose.RESIZE, less, self._now), ask_again_at
            chosen = self._fewest(head, [job for _, _, job, _ in due], free)
        limits = {job.id: limit for _, _, job, limit in due}
        return [
            event
            for job in chosen
            for event in request_stop(
                job, StopPurpose.PREEMPT, ByIdleReclaim(job=head.id, seconds=limits[job.id]), self._now
            )
        ], ask_again_at

    def shrink(self, job: Job) -> list[tuple[Job, int]]:
        """Return the elastic jobs that shrink for ``job``, with their remaining ranks; nothing if that is not enough.

        They got their ranks beyond ``min`` from resources that no job needed, so they give them back to a job of their
        queue that is of no lower priority, or for which they would be preempted anyway.
        """
        rule = Reclaim(job, self._shares, self._waiting)
        able = [other for other in self._jobs.elastic.values() if may_shrink(other, self._now) and rule.shrinks(other)]
        if not able or self._unknown:
            return []
        chosen: list[tuple[Job, int]] = []
        with self._trial() as free:
            there = [other for other in able if all(node in free for node in other.nodes)]
            if place(job, free, self._nodes) is not None:
                return []
            for other in sorted(there, key=lambda other: loss(other, self._now)):
                vacate(other, free)
                for ranks in range(other.num_workers - 1, other.size.least - 1, -1):
                    where = place(other, free, self._nodes, ranks=ranks)
                    if where is None:
                        continue
                    shares = take(other, where, free)  # placed before the job, as in the decision after their stop
                    if place(job, free, self._nodes) is not None:
                        return [*chosen, (other, ranks)]
                    if ranks > other.size.least:
                        give_back(other, where, shares, free)
                chosen.append((other, other.size.least))
        return []

    def _candidates(self) -> list[_Candidate]:
        """Return the jobs that time sharing may stop; note when there may be others."""
        if self._found is not None:
            return self._found
        self._found, now = [], self._now
        for job, clock, stops_at, began, _, _ in self._jobs.occupants():
            if stops_at is None:
                continue
            saved = self._saves.saved_at(job, now)
            fresh = saved is not None and saved >= began and now - saved <= REPEATED_SECONDS
            at = now if fresh else self._saves.next_at(job, now)
            if saved is None or saved < began or stops_at > now:
                self.due += [due for due in (at, stops_at) if due is not None]
            elif at is not None and now <= at <= now + DUE_SECONDS:
                level = running_level(clock, now, self._run_times)
                self._found.append(_Candidate(at, loss(job, now, self._saves), level, now - clock.ran_until(now), job))
        return self._found

    def _fewest(self, job: Job, candidates: Sequence[Job], free: FreeNodes) -> tuple[Job, ...]:
        """Return the first candidates without which the job fits, less those that are not needed, the last first."""
        gpus = rank_size(job)[1] * job.size.least
        if sum(rank_size(one)[1] * len(one.nodes) for one in candidates) + free.sums().gpus < gpus - EPSILON:
            return ()
        chosen: list[Job] = []
        for other in candidates:
            vacate(other, free)
            chosen.append(other)
            if place(job, free, self._nodes) is not None:
                break
        else:
            return ()
        for other in chosen[-2::-1]:
            occupy(other, free)
            if place(job, free, self._nodes) is None:
                vacate(other, free)
            else:
                chosen.remove(other)
        return tuple(chosen)

    def _fits_beside_fewest(self, head: Job, job: Job, free: FreeNodes) -> bool:
        if job.num_workers <= job.size.least:
            return False
        free.begin()
        try:
            vacate(job, free)
            where = place(job, free, self._nodes)
            if where is None:
                return False
            take(job, where, free)
            return place(head, free, self._nodes) is not None
        finally:
            free.restore()
