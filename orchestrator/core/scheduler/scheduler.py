"""``decide(state, now) -> commands``: the whole policy of the daemon as one pure function.

What follows from a job's record alone is in ``lifecycle/advance.py``; here jobs are weighed against one another and the nodes.
Commands are events to be written, and effects to be carried out once the events are. Effects are derived from the
record alone, so a restarted daemon that has read the store orders exactly what was under way. The order is that of order.py
(shares of queues and users, priority, arrival); a gang that does not fit claims what is free, so nothing behind it can starve it, and the first one that does not fit
has jobs of lower priority stopped (preemption.py). What no job needs goes to elastic jobs (elastic.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsJob, AwaitsRoom, BackingOff, DoesNotFit, NoRoom, NotEnoughFree
from orchestrator.core.facts.requesters import ByGrowth, ByPreemption
from orchestrator.core.lifecycle.advance import advance, is_resizing, request_stop, wants_gang
from orchestrator.core.lifecycle.effects import Effect, desired_effect
from orchestrator.core.scheduler import elastic
from orchestrator.core.scheduler.order import WaitingOrder, lanes_of
from orchestrator.core.scheduler.placement import claim, could_ever_fit, free_on, rank_size, take
from orchestrator.core.scheduler.preemption import make_room
from orchestrator.core.scheduler.prerequisites import hindrance
from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.reclaim import Reclaim
from orchestrator.core.scheduler.shares import Shares
from orchestrator.core.scheduler.skips import Skips, shape_of
from orchestrator.core.scheduler.use import PastUse
from orchestrator.core.states import JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from orchestrator.core.cluster import Free, Node
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a decision looks at: every live (not terminal) job, the nodes, and how jobs ended that live ones depend on.

    In ``ended``, None stands for a job whose record is gone. ``sharing`` are the queues and limits, ``past`` what was used.
    """

    jobs: Mapping[JobId, Job]
    nodes: Mapping[str, Node]
    ended: Mapping[JobId, JobState | None] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    past: PastUse = field(default_factory=PastUse)


@dataclass(slots=True, kw_only=True)
class Commands:
    """Events to write, effects that the records want, when to ask again, and why jobs wait."""

    events: list[ev.Event] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    wake_at: float | None = None
    waiting: dict[JobId, Fact] = field(default_factory=dict)

    def ask_again(self, at: float | None) -> None:
        """Ask again no later than ``at``."""
        if at is not None and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at


def decide(state: State, now: float) -> Commands:
    """What follows from ``state`` at wall time ``now``. After its events are folded, ask again until there are none."""
    commands = Commands()
    for job in state.jobs.values():
        if job.state.may_hold_gang:
            _advance(job, now, commands)
        elif job.submission.prerequisites:
            _await_prerequisites(job, state, now, commands)
    _schedule(state, now, commands)
    return commands


def queue_order(job: Job) -> tuple[int, int]:
    """Higher priority first, then order of arrival: the order of one user's jobs in one queue."""
    return (-job.priority, job.submission.sequence)


def _advance(job: Job, now: float, commands: Commands) -> None:
    events, wake_at = advance(job, now)
    if wake_at is not None:
        commands.ask_again(wake_at)
    if events:
        commands.events += events
    elif (effect := desired_effect(job)) is not None:
        commands.effects.append(effect)


def _await_prerequisites(job: Job, state: State, now: float, commands: Commands) -> None:
    """A job that depends on others waits, claiming nothing; it fails when one of them ended in the wrong way."""
    found = hindrance(job, state.jobs, state.ended)
    if found is not None and not isinstance(found, AwaitsJob):
        commands.events.append(ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=found))
    if found is not None:
        commands.waiting[job.id] = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of placing: the jobs that wait for a gang, in order, those that hold one, and what is free beside these.

    ``shares`` count what holding jobs have, and follow what the round places; ``waiting`` are the queues of waiting jobs.
    ``free`` is what is left when the round is over. ``brief``: reasons are wanted only of the first jobs that wait, so
    the round ends when no GPU is left.
    """

    queue: Iterable[Job]
    holding: Collection[Job]
    free: Mapping[str, Free]
    nodes: Mapping[str, Node]
    shares: Shares
    waiting: Collection[str] = ()
    brief: bool = False


def _schedule(state: State, now: float, commands: Commands) -> None:
    holding = [job for job in state.jobs.values() if job.gang_open]
    free = free_on(state.nodes.values(), holding)
    shares = Shares.of(state.sharing, state.past, holding, state.nodes, now)
    queue = _order((j for j in state.jobs.values() if j.id not in commands.waiting), state, shares, now)
    round_ = Round(queue=queue, holding=holding, free=free, nodes=state.nodes, shares=shares, waiting=queue.queues())
    schedule(round_, now, commands)
    commands.ask_again(queue.next_overdue())
    _grow(state, free, shares, now, commands)


def _order(jobs: Iterable[Job], state: State, shares: Shares, now: float) -> WaitingOrder:
    ready = [job for job in jobs if wants_gang(job, now)]
    resized = [job for job in ready if is_resizing(job)]
    lanes = lanes_of(job for job in ready if not is_resizing(job)) if resized else lanes_of(ready)
    return WaitingOrder(lanes, state.past.started, shares, now, resized=resized)


def waiting_order(state: State, now: float) -> list[Job]:
    """The jobs that wait for a gang, in the order in which a decision at ``now`` looks at them before it places any."""
    shares = shares_of(state, now)
    return list(_order((j for j in state.jobs.values() if not _hindered(j, state)), state, shares, now))


def shares_of(state: State, now: float) -> Shares:
    """Who holds and has used how much."""
    holding = [job for job in state.jobs.values() if job.gang_open]
    return Shares.of(state.sharing, state.past, holding, state.nodes, now)


def _hindered(job: Job, state: State) -> bool:
    return bool(job.submission.prerequisites) and hindrance(job, state.jobs, state.ended) is not None


def schedule(round_: Round, now: float, commands: Commands) -> None:
    """Start what has room, in the queue's order, and have jobs stopped for the first that finds too little."""
    free, nodes = round_.free, round_.nodes
    skips = Skips(free, nodes)
    placed: list[tuple[Job, tuple[str, ...], tuple[str | None, ...]]] = []
    head: Job | None = None
    for job in round_.queue:
        found = _try(job, round_, skips, now, commands)
        if found is not None:
            placed.append((job, found, take(job, found, free)))
            round_.shares.started(job, len(found))
            skips.changed()
            continue
        if job.state is not JobState.PENDING:
            reason = NoRoom(ranks=job.size.least, cause=job.reason)
            commands.events.append(ev.JobRequeued(job_id=job.id, at=now, reason=reason))
        if head is None and isinstance(commands.waiting.get(job.id), NotEnoughFree):
            head = job
        if round_.brief and skips.sums(whole=False)[0] <= 0:
            break
    for job, found, shares in placed:
        larger = elastic.extend(job, found, shares, free, nodes, round_.shares.most_ranks(job))
        round_.shares.more(job, len(larger) - len(found))
        commands.events.append(
            ev.AttemptStarted(job_id=job.id, at=now, attempt=job.attempt_number + 1, gang=job.gang + 1, nodes=larger)
        )
    if not commands.events:
        _preempt(head, round_, now, commands)


def _preempt(head: Job | None, round_: Round, now: float, commands: Commands) -> None:
    """Have jobs stopped for the first job of the queue that finds too little free, once nothing else changes."""
    if head is None:
        return
    room = make_room(head, round_.holding, round_.nodes, now, Reclaim(head, round_.shares, round_.waiting))
    commands.ask_again(room.ask_again_at)
    by = ByPreemption(job=head.id, priority=head.priority)
    for job in room.stop:
        commands.events.extend(request_stop(job, StopPurpose.PREEMPT, by, now))
    if stopping := room.stop or room.stopping:
        commands.waiting[head.id] = AwaitsRoom(jobs=tuple(job.id for job in stopping))


def _try(job: Job, round_: Round, skips: Skips, now: float, commands: Commands) -> tuple[str, ...] | None:
    """Where the job goes; None, with the reason noted and what it waits for claimed, when it has to wait."""
    free, nodes = round_.free, round_.nodes
    if not nodes:
        return None
    if job.not_before > now:
        commands.ask_again(job.not_before)
        commands.waiting[job.id] = BackingOff(seconds=job.not_before - now, cause=job.reason)
        return None
    limit = round_.shares.hindrance(job)
    if limit is not None:  # it claims nothing: what is free is of no use to it
        commands.waiting[job.id] = limit
        return None
    shape = shape_of(job)
    full = skips.full(shape)
    found = None if full else elastic.first_place(job, free, nodes)
    if found is not None:
        return found
    if not skips.fits_ever(job, shape):
        # It claims nothing: what will never be enough for it would be kept from all jobs behind it.
        gpus, cpus = _demand(job)
        commands.waiting[job.id] = DoesNotFit(gpus=gpus, cpus=cpus)
        return None
    commands.waiting[job.id] = _why_waiting(job, skips)
    if not full:
        if claim(job, free, nodes):
            skips.fill(shape)
        skips.changed()
    return None


def _grow(state: State, free: Mapping[str, Free], shares: Shares, now: float, commands: Commands) -> None:
    """Stop elastic jobs that can have more ranks than they do, where this is a good moment for them."""
    busy = {event.job_id for event in commands.events}
    due = [j for j in state.jobs.values() if j.id not in busy and elastic.growth_due(j, now)]
    if not due:
        return
    for job in state.jobs.values():  # those in their back-off delay no job, but no job grows into what they need
        backs_off = job.state is JobState.PENDING and job.not_before > now
        if backs_off and could_ever_fit(job, state.nodes):
            claim(job, free, state.nodes)
    for job in sorted(due, key=queue_order):
        at = elastic.growth_due(job, now)
        if at is not True:
            commands.ask_again(float(at))
            continue
        size = elastic.grown_size(job, free, state.nodes, shares.most_ranks(job))
        if size > job.num_workers:
            shares.more(job, size - job.num_workers)
            by = ByGrowth(ranks=size, instead_of=job.num_workers)
            commands.events.extend(request_stop(job, StopPurpose.RESIZE, by, now))


def _why_waiting(job: Job, skips: Skips) -> NotEnoughFree:
    gpus, cpus = _demand(job)
    free_gpus, free_cpus = skips.sums(
        whole=rank_size(job)[1] >= 1
    )  # what is left of shared GPUs is nothing to a whole one
    return NotEnoughFree(gpus=gpus, cpus=cpus, free_gpus=free_gpus, free_cpus=free_cpus)


def _demand(job: Job) -> tuple[float, float]:
    """GPUs and CPUs of the fewest ranks that it may have."""
    cpus, gpus, _ = rank_size(job)
    return gpus * job.size.least, cpus * job.size.least


__all__ = ["Commands", "Round", "State", "decide", "queue_order", "schedule", "shares_of", "waiting_order"]
