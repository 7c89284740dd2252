"""``decide(state, now) -> commands``: the whole policy of the daemon as one pure function.

``lifecycle/advance.py`` derives what follows from a job's record alone; this module weighs jobs against one another and
the nodes. Commands are events to be written, and effects to be carried out once the events are. Effects are derived
from the record alone, so a restarted daemon that has read the store orders exactly what was under way. Jobs are placed
in the order of order.py (shares of queues and users, priority, arrival). Free resources are kept for a gang that does
not fit, in the end from all other jobs, so that no job starves (rounds/head.py). Jobs of lower priority are stopped for
the first gang that does not fit (preemption.py), and jobs that end before it could start run on what it has claimed
(backfill.py). Resources that no job needs go to elastic jobs (elastic.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import (
    AwaitsNodes,
    BackingOff,
    DoesNotFit,
    NoNodeWithLabels,
    NoRoom,
    NotEnoughFree,
)
from orchestrator.core.facts.requesters import ByGrowth, ByNodeReservation
from orchestrator.core.lifecycle.advance import advance, is_returning, request_stop, wants_gang
from orchestrator.core.lifecycle.effects import desired_effect
from orchestrator.core.scheduler import elastic
from orchestrator.core.scheduler.conditions.held import fail_fast
from orchestrator.core.scheduler.lanes import kind_of, lane_of
from orchestrator.core.scheduler.live import LiveJobs, Reasons
from orchestrator.core.scheduler.order import WaitingOrder
from orchestrator.core.scheduler.placement import (
    claim,
    could_ever_fit,
    holds_rank,
    labels_of,
    missing_nodes,
    rank_size,
    shape_of,
    suits,
    take,
)
from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.room.closed import closed_for
from orchestrator.core.scheduler.room.timetable import Timetable, closed_to, nodes_at
from orchestrator.core.scheduler.rounds.commands import Commands
from orchestrator.core.scheduler.rounds.head import Head
from orchestrator.core.scheduler.rounds.making_room import make_room_for
from orchestrator.core.scheduler.rounds.round import Round
from orchestrator.core.scheduler.shares import Shares
from orchestrator.core.scheduler.skips import Skips
from orchestrator.core.scheduler.use import PastUse
from orchestrator.core.states import JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Free, Node
    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Input of a decision: every live (not terminal) job, the nodes, and how the jobs ended that live ones depend on.

    With ``LiveJobs`` that are kept between decisions, a decision costs only what has changed; any other mapping is
    indexed anew each time. In ``ended``, None stands for a job without a record. ``failed_fast`` has, by matrix id, the
    job that has just failed and with which the matrix ends. ``sharing`` has the queues and limits, ``past`` the earlier
    use, and ``idle`` since when all GPUs of running jobs are idle.
    """

    jobs: Mapping[JobId, Job]
    nodes: Mapping[str, Node]
    ended: Mapping[JobId, JobState | None] = field(default_factory=dict)
    sharing: Sharing = field(default_factory=Sharing)
    past: PastUse = field(default_factory=PastUse)
    failed_fast: Mapping[str, JobId] = field(default_factory=dict)
    idle: Mapping[JobId, float] = field(default_factory=dict)


def decide(state: State, now: float) -> Commands:
    """Return what follows from ``state`` at wall time ``now``. Fold the events and call it again until there are none.

    Effects are only those of jobs with a record that has changed since the last decision with the same ``LiveJobs``.
    """
    jobs = indexed(state.jobs)
    commands = Commands(waiting=Reasons(jobs))
    for job in jobs.to_advance(now):
        _advance(job, jobs, now, commands)
    commands.ask_again(jobs.next_due())
    released = jobs.release(state.ended, now)
    for job, reason in released.failing:
        commands.events.append(ev.JobFinished(job_id=job.id, at=now, state=JobState.FAILED, reason=reason))
        commands.waiting[job.id] = reason
    if state.failed_fast:
        ending = fail_fast(state.jobs.values(), state.failed_fast, now)
        if ending:  # none of them is to start in the same round
            commands.events += ending
            return commands
    commands.ask_again(released.wake_at)
    _schedule(jobs, released.released, state, now, commands)
    return commands


def indexed(jobs: Mapping[JobId, Job]) -> LiveJobs:
    """Return the jobs with the index that decisions use."""
    return jobs if isinstance(jobs, LiveJobs) else LiveJobs(jobs.values())


def queue_order(job: Job) -> tuple[int, int]:
    """Return the sort key of one user's jobs in one queue: higher priority first, then order of arrival."""
    return (-job.priority, job.submission.sequence)


def _advance(job: Job, jobs: LiveJobs, now: float, commands: Commands) -> None:
    events, wake_at = advance(job, now)
    if wake_at is not None:
        commands.ask_again(wake_at)
    if events:
        commands.events += events
        return
    jobs.seen(job, wake_at)
    if (effect := desired_effect(job)) is not None:
        commands.effects.append(effect)


def _schedule(jobs: LiveJobs, released: Iterable[Job], state: State, now: float, commands: Commands) -> None:
    shares = _shares(jobs, state, now)
    queue = _order(jobs, released, state, shares, now)
    limited = queue.limited()
    nodes = nodes_at(state.nodes, now, state.past.run_times)
    if isinstance(nodes, Timetable):
        _close(jobs, nodes, now, commands)
    with jobs.occupancy.free(nodes) as (free, loose):
        round_ = Round(
            queue=queue,
            holding=jobs.occupancy.holding,
            free=free,
            nodes=nodes,
            shares=shares,
            waiting=queue.queues(),
            fits_ever=jobs.fits_ever,
            run_times=state.past.run_times,
            loose=loose if limited else None,
            idle=state.idle,
            closed=jobs.occupancy.closed(nodes),
        )
        schedule(round_, now, commands)
        commands.ask_again(queue.next_overdue())
        _grow(jobs, nodes, free, shares, now, commands)


def _close(jobs: LiveJobs, nodes: Timetable, now: float, commands: Commands) -> None:
    """Stop the jobs on nodes with a reservation that has begun: they save, and return to their place in the queue."""
    commands.ask_again(nodes.next_change())
    busy = {event.job_id for event in commands.events}
    for job in jobs.occupancy.holding if nodes.closed else ():
        there = next((node_id for node_id in job.nodes if node_id in nodes.closed), None)
        if there is None or job.id in busy:
            continue
        one = nodes.closed[there]
        by = ByNodeReservation(node=nodes[there].name, end=one.end, said=one.reason)
        commands.events.extend(request_stop(job, StopPurpose.PREEMPT, by, now))


def _order(jobs: LiveJobs, released: Iterable[Job], state: State, shares: Shares, now: float) -> WaitingOrder:
    """Return the order of the waiting jobs; ``released`` are jobs besides those of the lines that may be considered."""
    returning = [job for job in {**jobs.elastic, **jobs.moving}.values() if wants_gang(job, now)]
    others = [*released, *(job for job in returning if not is_returning(job))]
    resized = [job for job in returning if is_returning(job)]
    run_times = state.past.run_times
    jobs.lines.learn(run_times)
    return WaitingOrder(
        jobs.lines.by_lane, state.past.started, shares, now, others=others, resized=resized, run_times=run_times
    )


def waiting_order(state: State, now: float) -> list[Job]:
    """Return the jobs that wait for a gang, in the order in which a decision examines them before it places any."""
    return list(order_of(state, now)[0])


def order_of(state: State, now: float) -> tuple[WaitingOrder, Shares]:
    """Return the order in which a decision examines the jobs that wait, and the shares from which it follows."""
    jobs = indexed(state.jobs)
    released = jobs.release(state.ended, now).released
    shares = _shares(jobs, state, now)
    return _order(jobs, released, state, shares, now), shares


def shares_of(state: State, now: float) -> Shares:
    """Return the shares of queues and users, from what they hold and have used."""
    return _shares(indexed(state.jobs), state, now)


def _shares(jobs: LiveJobs, state: State, now: float) -> Shares:
    accounts = jobs.occupancy.accounts(state.sharing.half_life, now)
    capacity = jobs.occupancy.capacity(state.nodes)
    return Shares.of(state.sharing, state.past, (), state.nodes, now, accounts=accounts, capacity=capacity)


def schedule(round_: Round, now: float, commands: Commands) -> None:
    """Start the jobs that fit, in the queue's order, and have others stopped for the first one that does not fit."""
    free, nodes = round_.free, round_.nodes
    skips = Skips(free)
    placed: list[tuple[Job, tuple[str, ...], tuple[str | None, ...]]] = []
    ahead = Head(round_, now)
    for job in round_.queue:
        found = _try(job, round_, skips, ahead, now, commands)
        if found is not None:
            placed.append((job, found, take(job, found, free)))
            ahead.placed(job, found)
            commands.waiting.placed.add(job.id)
            round_.shares.started(job, len(found))
            continue
        if job.state is not JobState.PENDING:
            reason = NoRoom(ranks=job.size.least, cause=job.reason)
            commands.events.append(ev.JobRequeued(job_id=job.id, at=now, reason=reason))
        if round_.brief and skips.sums(whole=False)[0] <= 0:
            break
    if placed:
        _keep(ahead.kept_from(None), round_, skips)
    for job, found, shares in placed:
        larger = elastic.extend(job, found, shares, free, nodes, round_.shares.most_ranks(job))
        round_.shares.more(job, len(larger) - len(found))
        commands.events.append(
            ev.AttemptStarted(job_id=job.id, at=now, attempt=job.next_attempt, gang=job.next_gang, nodes=larger)
        )
    commands.ask_again(ahead.ask_again_at())
    if not commands.events:
        make_room_for(ahead, now, commands)
    _keep(ahead.kept_from(None), round_, skips)  # no elastic job grows into it


def _keep(jobs: Iterable[Job], round_: Round, skips: Skips) -> None:
    """Claim what is free for jobs that do not fit."""
    for job in jobs:
        closed = closed_to(job, round_.nodes)
        reach = (shape_of(job), closed) if closed else shape_of(job)
        if not skips.full(reach) and claim(job, round_.free, round_.nodes):
            skips.fill(reach)


def _try(job: Job, round_: Round, skips: Skips, ahead: Head, now: float, commands: Commands) -> tuple[str, ...] | None:
    """Return the nodes for the job; None, with the reason recorded and free resources claimed, if it has to wait."""
    nodes = round_.nodes
    if not nodes:
        return None
    if job.not_before > now:
        commands.ask_again(job.not_before)
        commands.waiting[job.id] = BackingOff(seconds=job.not_before - now, cause=job.reason)
        return None
    kind = kind_of(job)
    known = commands.waiting.shared.get((lane_of(job), kind))
    if known is not None:  # it is not grouped with its equals because it had a back-off, or conditions
        commands.waiting[job.id] = known
        return None
    limit = round_.shares.hindrance(job)
    if limit is not None:  # it claims nothing: what is free is of no use to it
        _pass_over(job, limit, round_, commands)
        return None
    _keep(ahead.kept_from(job), round_, skips)
    closed = closed_to(job, nodes)
    reach = (kind.shape, closed) if closed else kind.shape
    full = skips.full(reach)
    found = None if full else elastic.first_place(job, round_.free, nodes)
    if found is not None:
        return found
    if not round_.fits_ever(job, kind, nodes):
        # It claims nothing: what will never be enough for it would be kept from all jobs behind it.
        _pass_over(job, _why_never(job, nodes), round_, commands)
        return None
    found = ahead.backfilled(job)
    if found is not None:
        return found
    reason = commands.waiting[job.id] = _why_waiting(job, skips, round_, closed)
    ahead.falls_short(job)
    keeps = full or ahead.claims(job)
    if keeps and not full:
        full = claim(job, round_.free, nodes)
    if full:
        skips.fill(reach)
    alike = not closed or (isinstance(nodes, Timetable) and nodes.alike(job))
    if alike and (full or not keeps):
        _pass_over(job, reason, round_, commands)
    return None


def _pass_over(job: Job, reason: Fact, round_: Round, commands: Commands) -> None:
    """Record why the job, and all later ones of its lane and kind, wait: free resources and limits only shrink."""
    commands.waiting[job.id] = reason
    if job.state is JobState.PENDING:
        commands.waiting.shared[lane_of(job), kind_of(job)] = reason
        if isinstance(round_.queue, WaitingOrder):
            round_.queue.pass_over(job)


def _grow(
    jobs: LiveJobs, nodes: Mapping[str, Node], free: Mapping[str, Free], shares: Shares, now: float, commands: Commands
) -> None:
    """Stop elastic jobs that can have more ranks than they do, if they may be stopped now to grow."""
    busy = {event.job_id for event in commands.events}
    due = [j for j in jobs.elastic.values() if j.id not in busy and elastic.growth_due(j, now)]
    if not due:
        return
    for job in jobs.lines.delayed():  # jobs in their back-off delay no other, but no job grows into what they need
        if job.not_before > now and could_ever_fit(job, nodes):
            claim(job, free, nodes)
    for job in sorted(due, key=queue_order):
        at = elastic.growth_due(job, now)
        if at is not True:
            commands.ask_again(float(at))
            continue
        size = elastic.grown_size(job, free, nodes, shares.most_ranks(job))
        if size > job.num_workers:
            shares.more(job, size - job.num_workers)
            by = ByGrowth(ranks=size, instead_of=job.num_workers)
            commands.events.extend(request_stop(job, StopPurpose.RESIZE, by, now))


def _why_never(job: Job, nodes: Mapping[str, Node]) -> Fact:
    gpus, cpus = _demand(job)
    labels = labels_of(job)
    if labels and not any(n.labels.items() >= job.spec.resources.node_labels.items() for n in nodes.values()):
        return NoNodeWithLabels(labels=labels)
    down = missing_nodes(job, nodes)
    return AwaitsNodes(nodes=down, gpus=gpus, cpus=cpus) if down else DoesNotFit(gpus=gpus, cpus=cpus)


def _why_waiting(job: Job, skips: Skips, round_: Round, closed: frozenset[str]) -> NotEnoughFree:
    shape = shape_of(job)
    gpus, cpus = _demand(job)
    free_gpus, free_cpus = skips.sums(
        whole=rank_size(job)[1] >= 1
    )  # a rank with whole GPUs cannot use the rest of shared ones
    return NotEnoughFree(
        gpus=gpus,
        cpus=cpus,
        free_gpus=free_gpus,
        free_cpus=free_cpus,
        labels=labels_of(job),
        reserved=reserved_for(job, round_.nodes, closed) if closed else (),
        closed=closed_for(round_.closed, round_.holding.stopping.values(), lambda node: holds_rank(shape, node)),
    )


def reserved_for(job: Job, nodes: Mapping[str, Node], closed: frozenset[str]) -> tuple[Fact, ...]:
    """Return the reservations that close nodes (``closed``) to the job which would otherwise suit it."""
    shape = shape_of(job)
    there = frozenset(i for i in closed if nodes[i].alive and not nodes[i].cordoned and suits(shape, nodes[i]))
    return nodes.why(job, there) if isinstance(nodes, Timetable) else ()


def _demand(job: Job) -> tuple[float, float]:
    """Return the GPUs and CPUs of the fewest ranks that the job may have."""
    cpus, gpus, _ = rank_size(job)
    return gpus * job.size.least, cpus * job.size.least


__all__ = [
    "Commands",
    "Round",
    "State",
    "decide",
    "indexed",
    "order_of",
    "queue_order",
    "schedule",
    "shares_of",
    "waiting_order",
]
