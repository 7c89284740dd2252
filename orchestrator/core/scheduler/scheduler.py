"""``decide(state, now) -> commands``: the whole policy of the daemon as one pure function.

``lifecycle/advance.py`` derives what follows from a job's record alone; this module weighs jobs against one another and
the nodes. Commands are events to be written. Effects are derived from the record alone, so a restarted daemon that has
read the store orders exactly what was under way. Jobs are placed in the order of ``order.py``. Jobs that end before the
first one that does not fit could start run on what it has claimed (backfill), and others stop for it
(``preemption.py``). Resources that no job needs go to elastic jobs (``elastic.py``).

Backfill: the *head* is the first job for which too little is free. Once it claims the free resources, no job behind it delays it.
Its *reservation* is the time at which it fits if running jobs end as expected (``durations.py``) and the jobs that the
decision has placed run on. A later job may use claimed resources if its ``max_duration``, which is enforced, ends it
before that time. So the head is delayed only if running jobs end earlier than expected, and at most by the limit of a
job that began before that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import (
    AwaitsNodes,
    AwaitsRoom,
    BackingOff,
    ByGrowth,
    ByIdleReclaim,
    ByNodeReservation,
    ByPreemption,
    ByShrinking,
    ByTimeSharing,
    DoesNotFit,
    NoNodeWithLabels,
    NoRoom,
    NotEnoughFree,
)
from orchestrator.core.lifecycle.advance import advance, is_returning, request_stop, wants_gang
from orchestrator.core.scheduler import elastic
from orchestrator.core.scheduler.durations import Basis, claims_at, limit_left, waiting_since
from orchestrator.core.scheduler.live_jobs import LiveJobs, Reasons, fail_fast
from orchestrator.core.scheduler.order import WaitingOrder, group_of
from orchestrator.core.scheduler.placement import (
    ReservedNodes,
    claim,
    closed_for,
    closed_to,
    could_ever_fit,
    labels_of,
    missing_nodes,
    nodes_at,
    place,
    rank_size,
    shape_of,
    suits,
    take,
    vacate,
)
from orchestrator.core.scheduler.preemption import RECORDED, Preemption, PreemptionPlan, SharingPlan
from orchestrator.core.scheduler.shares import PastUse, Shares, Sharing
from orchestrator.core.states import JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes
    from orchestrator.core.scheduler.order import Group
    from orchestrator.core.scheduler.placement import FreeNodes
    from orchestrator.core.scheduler.preemption import Saves

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


MAX_TURNS: Final = 8
"""Maximum number of jobs that found too little free and are considered for time sharing in a decision."""
SOONEST: Final = 1.0
FOR_A_JOB: Final = (ByPreemption, ByTimeSharing, ByIdleReclaim, ByShrinking)
"""Requesters of stops that make room for a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Input of a decision: every live (not terminal) job, the nodes, and how the jobs ended that live ones depend on.

    With ``LiveJobs`` that are kept between decisions, a decision costs only what has changed; any other mapping is
    indexed anew each time. In ``ended``, None stands for a job without a record. ``failed_fast`` has, by matrix id, the
    job that has just failed and with which the matrix ends. ``sharing`` has the queues and limits, ``past`` the earlier
    use, ``idle`` since when all GPUs of running jobs are idle, and ``saves`` when they save. ``brief``: it does not
    matter why jobs wait, so a decision looks at no more jobs once no GPU is left, as for a trace in which every job needs one.
    """

    jobs: Mapping[JobId, Job]
    nodes: Mapping[str, Node]
    ended: Mapping[JobId, JobState | None] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    past: PastUse = field(default_factory=PastUse)
    failed_fast: Mapping[str, JobId] = field(default_factory=dict)
    idle: Mapping[JobId, float] = field(default_factory=dict)
    saves: Saves = RECORDED
    brief: bool = False


@dataclass(slots=True, kw_only=True)
class Commands:
    """Events to write, when to ask again, and why jobs wait."""

    events: list[ev.Event] = field(default_factory=list)
    wake_at: float | None = None
    waiting: Reasons = field(default_factory=Reasons)

    def ask_again(self, at: float | None) -> None:
        """Ask again no later than ``at``."""
        if at is not None and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at


def decide(state: State, now: float) -> Commands:
    """Return what follows from ``state`` at wall time ``now``. Fold the events and call it again until there are none."""
    jobs = indexed(state.jobs)
    commands = Commands(waiting=Reasons(jobs))
    for job in jobs.to_advance(now):
        events, wake_at = advance(job, now)
        commands.events += events
        if not events:
            jobs.seen(job, wake_at)
    commands.ask_again(jobs.next_due() if not commands.events else None)
    released = jobs.release(state.ended, now)
    commands.ask_again(released.wake_at)
    for job, reason in released.failing:
        commands.events.append(ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=reason))
        commands.waiting[job.id] = reason
    if state.failed_fast:
        ending = fail_fast(state.jobs.values(), state.failed_fast, now)
        if ending:  # none of them is to start in the same decision
            commands.events += ending
            return commands
    if jobs.waiting or jobs.elastic or any(node.reservations for node in state.nodes.values()):
        nodes = nodes_at(state.nodes, now, state.past.run_times)
        free = jobs.free(nodes)
        free.begin()
        _Pass(jobs, state, nodes, free, now, commands).run()
        free.restore()
    return commands


def indexed(jobs: Mapping[JobId, Job]) -> LiveJobs:
    """Return the jobs with the index that decisions use."""
    return jobs if isinstance(jobs, LiveJobs) else LiveJobs(jobs.values())


def queue_order(job: Job) -> tuple[int, int]:
    """Return the sort key of one user's jobs in one queue: higher priority first, then order of arrival."""
    return (-job.priority, job.submission.sequence)


def waiting_order(state: State, now: float) -> list[Job]:
    """Return the jobs that wait for a gang, in the order in which a decision examines them before it places any."""
    return list(order_of(state, now)[0])


def order_of(state: State, now: float) -> tuple[WaitingOrder, Shares]:
    """Return the order in which a decision examines the jobs that wait, and the shares from which it follows."""
    jobs = indexed(state.jobs)
    jobs.release(state.ended, now)
    shares = _shares(jobs, state, now)
    return _order(jobs, state, shares, now), shares


def shares_of(state: State, now: float) -> Shares:
    """Return the shares of queues and users, from what they hold and have used."""
    return _shares(indexed(state.jobs), state, now)


def _shares(jobs: LiveJobs, state: State, now: float) -> Shares:
    accounts = jobs.accounts(state.sharing.half_life, now)
    return Shares(state.sharing, state.past, accounts, jobs.capacity(state.nodes), now)


def _order(jobs: LiveJobs, state: State, shares: Shares, now: float) -> WaitingOrder:
    run_times = state.past.run_times
    jobs.waiting.learn(run_times)
    back = [job for job in jobs.elastic.values() if job.state is not JobState.PENDING and wants_gang(job, now)]
    lost = {
        group_of(job, ())._replace(alone=job.id): [(waiting_since(job), job.submission.sequence, job)]
        for job in back
        if not is_returning(job)
    }
    groups = {**jobs.waiting.groups, **lost} if lost else jobs.waiting.groups
    resized = [job for job in back if is_returning(job)]
    return WaitingOrder(groups, state.past.started, shares, run_times, now, resized)


class _Pass:
    """One pass over the waiting jobs: starts those that fit, and has others stopped for those that do not.

    ``_free`` is what is left besides what jobs that do not fit have claimed, ``_loose`` also counts that. Free resources
    are kept for a job that does not fit: at once from all jobs but its equals, the jobs of its queue and priority. What
    is kept from equals for a large gang is idle until as many others have ended, and this costs small jobs more than the
    large one gains. So a job claims free resources from its equals only (``_claims``)

    - if others stop for it, or will by time sharing;
    - if it is known by when the first job that does not fit starts (``has_bounded_start``);
    - once it has waited for ten times ``ageing``: in simulations, GPUs kept earlier were idle for days.
    """

    def __init__(
        self,
        jobs: LiveJobs,
        state: State,
        nodes: Mapping[str, Node],
        free: FreeNodes,
        now: float,
        commands: Commands,
    ) -> None:
        self._jobs = jobs
        self._state = state
        self._nodes = nodes
        self._free = free
        self._loose: FreeNodes | None = None
        self._now = now
        self._commands = commands
        self._shares = _shares(jobs, state, now)
        self._order = _order(jobs, state, self._shares, now)
        self._closed = [node for node in nodes.values() if not node.schedulable]
        self._stopping: list[Job] = []
        self._full: set[Hashable] = set()
        self._head: Job | None = None
        self._bounded = False
        self._served: set[str] = set()
        self._passed_by: list[Job] = []
        self._turns = 0
        self._turn: tuple[Job, SharingPlan] | None = None
        self._reserved: tuple[Reservation | None] | None = None
        self._making_room: Preemption | None = None
        self._room: PreemptionPlan | None = None

    def run(self) -> None:
        """Make the decision."""
        if isinstance(self._nodes, ReservedNodes):
            self._close(self._nodes)
        placed: list[tuple[Job, tuple[str, ...], tuple[str | None, ...]]] = []
        for job in self._order:
            where = self._try(job)
            if where is not None:
                placed.append((job, where, take(job, where, self._free)))
                if self._loose is not None:
                    take(job, where, self._loose)
                self._commands.waiting.placed.add(job.id)
                self._shares.started(job, len(where))
            elif job.state is not JobState.PENDING:
                reason = NoRoom(ranks=job.size.least, cause=job.reason)
                self._commands.events.append(ev.JobRequeued(job_id=job.id, at=self._now, reason=reason))
            elif self._state.brief and self._turns_over and self._free.sums().gpus <= 0:
                break
        if placed:
            self._keep(None)
        for job, where, shares in placed:
            most = self._shares.most_ranks(job)
            larger = elastic.extend(job, where, shares, self._free, self._nodes, most)
            self._shares.more(job, len(larger) - len(where))
            number, gang = job.next_attempt, job.next_gang
            self._commands.events.append(
                ev.AttemptStarted(job_id=job.id, at=self._now, attempt=number, gang=gang, nodes=larger)
            )
        self._commands.ask_again(self._order.next_aged())
        if self._head is not None and not self._commands.events:
            self._make_room(self._head)
        self._keep(None)  # no elastic job grows into it
        self._grow()

    def _close(self, nodes: ReservedNodes) -> None:
        """Stop the jobs on nodes with a reservation that has begun: they save, and return to their place in the queue."""
        self._commands.ask_again(nodes.next_change())
        busy = {event.job_id for event in self._commands.events}
        for job in self._jobs.holding.values() if nodes.closed else ():
            there = next((node_id for node_id in job.nodes if node_id in nodes.closed), None)
            if there is not None and job.id not in busy:
                one = nodes.closed[there]
                by = ByNodeReservation(node=nodes[there].name, end=one.end, said=one.reason)
                self._commands.events += request_stop(job, StopPurpose.PREEMPT, by, self._now)

    # -- one waiting job ---------------------------------------------------------------------------------------------

    def _try(self, job: Job) -> tuple[str, ...] | None:
        """Return the nodes for the job; None, with the reason recorded and free resources claimed, if it has to wait."""
        group = self._jobs.waiting.group(job.id) or group_of(job, ())
        if not self._nodes:
            return None
        if job.not_before > self._now:
            self._commands.ask_again(job.not_before)
            self._commands.waiting[job.id] = BackingOff(seconds=job.not_before - self._now, cause=job.reason)
            return None
        limit = self._shares.hindrance(job)
        if limit is not None:  # it claims nothing: what is free is of no use to it
            self._pass_over(job, group, limit)
            return None
        self._keep(job)
        closed = closed_to(job, self._nodes)
        full = (group.shape, closed) in self._full
        where = None if full else elastic.first_place(job, self._free, self._nodes)
        if where is not None:
            return where
        if not self._jobs.fits_ever(job, group, self._nodes):
            # It claims nothing: what will never be enough for it would be kept from all jobs behind it.
            self._pass_over(job, group, self._why_never(job))
            return None
        where = self._backfilled(job)
        if where is not None:
            return where
        if self._head is None:
            self._falls_short_first(job)
        reason = self._commands.waiting[job.id] = self._why_waiting(job, closed)
        claims = self._claims(job)
        if not claims:
            self._passed_by.append(job)
        elif not full:
            full = self._claim(job, closed)
        if (full or not claims) and not (closed and group.ran):  # with closed nodes those of one class may differ
            self._pass_over(job, group, reason)
        return None

    def _pass_over(self, job: Job, group: Group, reason: Fact) -> None:
        """Record why the job, and all later ones of its group, wait: free resources and limits only shrink."""
        self._commands.waiting[job.id] = reason
        if job.state is JobState.PENDING:
            self._commands.waiting.shared[group] = reason
            self._order.pass_over(group)

    def _claim(self, job: Job, closed: frozenset[str]) -> bool:
        """Claim what is free for a job; return whether no rank of its shape fits any more."""
        reach = (shape_of(job), closed)
        if reach not in self._full and claim(job, self._free, self._nodes):
            self._full.add(reach)
        return reach in self._full

    def _keep(self, job: Job | None) -> None:
        """Claim for the jobs that do not fit and that ``job`` may not delay, as it is not their equal; None: no job may."""
        first = self._passed_by[0] if self._passed_by else None
        if first is None or (job is not None and self._shares.tree.are_equals(first, job)):
            return
        for other in self._passed_by:
            self._claim(other, closed_to(other, self._nodes))
        self._passed_by.clear()

    def _falls_short_first(self, job: Job) -> None:
        self._head = job
        self._loose = self._free.copy()
        self._bounded = has_bounded_start(job, self._jobs, self._loose, self._nodes, self._now)
        self._stopping = [one.job for one in self._jobs.occupants() if one.job.stop is not None]
        by = [one.stop.by for one in self._stopping if one.stop is not None]
        self._served = {one.job for one in by if isinstance(one, FOR_A_JOB)}
        at = claims_at(job, self._shares.sharing.ageing)
        self._commands.ask_again(at if at > self._now else None)

    def _claims(self, job: Job) -> bool:
        """Whether free resources are kept from all other jobs for one that does not fit."""
        if self._has_turn(job) or self._bounded or job.id in self._served or is_returning(job):
            return True
        return claims_at(job, self._shares.sharing.ageing) <= self._now

    @property
    def _turns_over(self) -> bool:
        return self._turn is not None or self._turns >= MAX_TURNS

    def _has_turn(self, job: Job) -> bool:
        """Whether others stop for the job by time sharing: it is the first for which enough of them are due to save."""
        if not self._turns_over:
            self._turns += 1
            turn = self._preemption().turn(job)
            self._turn = None if turn is None else (job, turn)
        return self._turn is not None and self._turn[0] is job

    # -- room for those that do not fit ------------------------------------------------------------------------------

    def _preemption(self) -> Preemption:
        if self._making_room is None:
            assert self._loose is not None
            self._making_room = Preemption(
                self._jobs,
                self._loose,
                self._nodes,
                self._shares,
                self._state.past.run_times,
                self._now,
                waiting=self._order.queues(),
                saves=self._state.saves,
            )
        return self._making_room

    def _backfilled(self, job: Job) -> tuple[str, ...] | None:
        """Return the nodes for a job that ends before the head can start; None if it has to wait, or without a head."""
        limit = limit_left(job, self._now)
        if self._head is None or self._loose is None or limit is None:
            return None
        where = place(job, self._loose, self._nodes)
        if where is None:
            return None
        if self._reserved is None:
            self._reserved = (self._reservation(self._head),)
        reserved = self._reserved[0]
        if reserved is None or self._now + limit <= reserved.at:
            return None if reserved is None else where
        if reserved.recedes:
            self._commands.ask_again(max(self._now + SOONEST, self._now + limit - (reserved.at - self._now)))
        return None

    def _reservation(self, head: Job) -> Reservation | None:
        """Return when the head starts; None if this is not known, or if jobs stop for it or for another job already."""
        room = self._room_for(head)
        if room.stop or room.stopping or (self._turn is not None and self._turn[0] is not head):
            return None
        assert self._loose is not None
        found = reservation(head, self._jobs, self._loose, self._nodes, self._now, self._state.past.run_times)
        due = room.ask_again_at if self._turn is None else self._turn[1].at
        return Reservation(due) if due is not None and (found is None or due < found.at) else found

    def _room_for(self, head: Job) -> PreemptionPlan:
        if self._room is None:
            self._room = self._preemption().room(head)
        return self._room

    def _make_room(self, head: Job) -> None:
        """Stop or shrink others for jobs that do not fit; called once nothing else changes."""
        if self._shrink(head) or self._reclaim_idle(head):
            return
        room = self._room_for(head)
        self._commands.ask_again(room.ask_again_at)
        if room.stop or room.stopping or room.later:
            by = ByPreemption(job=head.id, priority=head.priority)
            self._stop(room.stop, by)
            if stopping := room.stop or room.stopping:
                self._commands.waiting[head.id] = AwaitsRoom(jobs=tuple(other.id for other in stopping))
        elif self._turn is not None:
            job, turn = self._turn
            self._commands.ask_again(turn.ask_again_at)
            overdue = claims_at(job, self._shares.sharing.ageing) <= self._now
            self._stop(turn.stop, ByTimeSharing(job=job.id, overdue=overdue))
            if turn.stop:
                self._commands.waiting[job.id] = AwaitsRoom(jobs=tuple(other.id for other in turn.stop))
        else:
            self._commands.ask_again(min((at for at in self._preemption().due if at > self._now), default=None))

    def _stop(self, others: tuple[Job, ...], by: Fact) -> None:
        for other in others:
            self._commands.events += request_stop(other, StopPurpose.PREEMPT, by, self._now)

    def _shrink(self, head: Job) -> bool:
        if not self._jobs.elastic:
            return False
        stops = ((other, other.stop.by) for other in self._jobs.elastic.values() if other.stop is not None)
        shrinking = [other for other, by in stops if isinstance(by, ByShrinking) and by.job == head.id]
        smaller = [] if shrinking else self._preemption().shrink(head)
        for other, ranks in smaller:
            by = ByShrinking(job=head.id, ranks=ranks, instead_of=other.num_workers)
            self._commands.events += request_stop(other, StopPurpose.RESIZE, by, self._now)
        shrinking += [other for other, _ in smaller]
        if shrinking:
            self._commands.waiting[head.id] = AwaitsRoom(jobs=tuple(other.id for other in shrinking))
        return bool(shrinking)

    def _reclaim_idle(self, head: Job) -> bool:
        if not self._state.idle:
            return False
        events, at = self._preemption().idle(head, self._state.idle, self._shares.sharing.reclaim_idle)
        self._commands.ask_again(at)
        if events:
            self._commands.events += events
            self._commands.waiting[head.id] = AwaitsRoom(jobs=tuple(event.job_id for event in events))
        return bool(events)

    def _grow(self) -> None:
        """Stop elastic jobs that can have more ranks than they do, if they may be stopped now to grow."""
        busy = {event.job_id for event in self._commands.events}
        due = [j for j in self._jobs.elastic.values() if j.id not in busy and elastic.growth_due(j, self._now)]
        if not due:
            return
        for group, entries in self._jobs.waiting.groups.items():
            job = entries[0][2]  # jobs in their back-off delay no other, but no job grows into what they need
            if group.alone and job.not_before > self._now and could_ever_fit(job, self._nodes):
                claim(job, self._free, self._nodes)
        for job in sorted(due, key=queue_order):
            at = elastic.growth_due(job, self._now)
            if at is not True:
                self._commands.ask_again(float(at))
                continue
            size = elastic.grown_size(job, self._free, self._nodes, self._shares.most_ranks(job))
            if size > job.num_workers:
                self._shares.more(job, size - job.num_workers)
                by = ByGrowth(ranks=size, instead_of=job.num_workers)
                self._commands.events += request_stop(job, StopPurpose.RESIZE, by, self._now)

    # -- why a job waits ---------------------------------------------------------------------------------------------

    def _why_never(self, job: Job) -> Fact:
        gpus, cpus = _demand(job)
        labels = job.spec.resources.node_labels
        if labels and not any(n.labels.items() >= labels.items() for n in self._nodes.values()):
            return NoNodeWithLabels(labels=labels_of(job))
        down = missing_nodes(job, self._nodes)
        return AwaitsNodes(nodes=down, gpus=gpus, cpus=cpus) if down else DoesNotFit(gpus=gpus, cpus=cpus)

    def _why_waiting(self, job: Job, closed: frozenset[str]) -> NotEnoughFree:
        gpus, cpus = _demand(job)
        free = self._free.sums()
        return NotEnoughFree(
            gpus=gpus,
            cpus=cpus,
            free_gpus=free.whole if rank_size(job)[1] >= 1 else free.gpus,  # it cannot use the rest of shared ones
            free_cpus=free.cpus,
            labels=labels_of(job),
            reserved=reserved_for(job, self._nodes, closed) if closed else (),
            closed=closed_for(job, self._closed, self._stopping) if self._closed else (),
        )


def reserved_for(job: Job, nodes: Mapping[str, Node], closed: frozenset[str]) -> tuple[Fact, ...]:
    """Return the reservations that close nodes (``closed``) to the job which would otherwise suit it."""
    shape = shape_of(job)
    there = frozenset(i for i in closed if nodes[i].alive and not nodes[i].cordoned and suits(shape, nodes[i]))
    return nodes.why(job, there) if isinstance(nodes, ReservedNodes) else ()


def _demand(job: Job) -> tuple[float, float]:
    """Return the GPUs and CPUs of the fewest ranks that the job may have."""
    cpus, gpus, _ = rank_size(job)
    return gpus * job.size.least, cpus * job.size.least
