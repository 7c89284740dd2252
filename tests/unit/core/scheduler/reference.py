"""Slow and simple reference scheduler, and random cases to compare the production scheduler with.

It handles whole GPUs, CPUs and memory, models, nodes away from the daemon's home, back-offs, strategies, preemption,
queues, users' shares, limits, ageing, backfill and time sharing; it recomputes everything for each job, and tries each
set of jobs to stop in turn. ``python -m tests.unit.core.scheduler.reference N`` compares N cases (`make reference`).
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.cluster import Node, NodeReservation
from orchestrator.core.facts.faults import Closure, NodeClosed
from orchestrator.core.facts.reasons import (
    AwaitsNodes,
    AwaitsRoom,
    BackingOff,
    ByIdleReclaim,
    ByNodeReservation,
    ByPreemption,
    ByTimeSharing,
    ByUser,
    DoesNotFit,
    MadeRoom,
    NodeReserved,
    NoNodeWithLabels,
    NotEnoughFree,
)
from orchestrator.core.scheduler.durations import Like
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.scheduler.shares import PastUse, Sharing
from orchestrator.core.states import StopPurpose
from tests.support.records import replace
from tests.unit.core.builders import (
    after,
    changed,
    checkpoint,
    gone,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    stop,
)
from tests.unit.core.scheduler.reference_sharing import NAMES, NOW, Policy, need, random_policy, ranks_of, waits_since

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.core.facts.fact import Fact
    from orchestrator.core.job.record import Job


@dataclass
class Left:
    """Free resources of one node."""

    cpus: float
    gpus: float
    memory: int

    def holds(self, job: Job) -> bool:
        """Return whether one more rank fits. What it does not need may be taken twice: by a claim, and by a job that ends before."""
        left = (self.cpus, self.gpus, self.memory)
        return all(there >= needed for there, needed in zip(left, need(job), strict=True) if needed)

    def take(self, job: Job, ranks: int = 1) -> None:
        cpus, gpus, memory = need(job)
        self.cpus, self.gpus, self.memory = (
            self.cpus - ranks * cpus,
            self.gpus - ranks * gpus,
            self.memory - ranks * memory,
        )


@dataclass
class Answer:
    """A decision: gangs to start, jobs to stop, and the reasons why the others wait."""

    starts: list[tuple[str, tuple[str, ...]]]
    stops: list[str]
    waiting: dict[str, Fact]
    closing: set[str] = field(default_factory=set)
    reclaimed: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    backfilled: int = 0


def all_left(known: Mapping[str, Node], holding: Sequence[Job], *, empty: bool = False) -> dict[str, Left]:
    """Return the resources that ``holding`` leaves on nodes that take jobs; with ``empty``, on every living node."""
    found = {}
    for one in known.values():
        closed = one.cordoned or _begun(one)
        if one.alive and (empty or not closed):
            found[one.id] = Left(one.cpus, one.gpus, one.memory_bytes)
            for job in holding:
                found[one.id].take(job, job.nodes.count(one.id))
    return found


def expected(job: Job, policy: Policy, at: float) -> float | None:
    """Return the seconds that a job that starts or restarts is expected to need; None if nothing is known."""
    ran = job.past.ran_seconds + sum(
        (a.ended_at or at) - a.running_at for a in job.attempts if a.running_at is not None and a.state is not None
    )
    times = policy.past.run_times.known.get(Like(job.submission.user, job.name), ())
    longer = [seconds for seconds in times if seconds > ran]
    found = statistics.median(longer) - ran if len(times) >= 3 and longer else ran or None
    if job.spec.max_duration is None:
        return found
    began = at if job.started_at is None else job.started_at
    limit = max(0.0, began + job.spec.max_duration.total_seconds() - at)
    return limit if found is None else min(found, limit)


def barred(job: Job, known: Mapping[str, Node], policy: Policy, at: float = NOW) -> list[str]:
    """Return the nodes that are reserved at a time at which a job that starts ``at`` one would still run."""
    seconds = expected(job, policy, at)
    ends = float("inf") if seconds is None else at + seconds
    return [i for i, one in known.items() if any(r.end > at and r.start < ends for r in one.reservations)]


def usable(
    job: Job, left: Mapping[str, Left], known: Mapping[str, Node], policy: Policy, at: float = NOW
) -> dict[str, Left]:
    """Return the part of ``left`` on the nodes that the job may use, with the same values as in ``left``."""
    return {i: there for i, there in left.items() if i not in barred(job, known, policy, at)}


def reserved_for(job: Job, known: Mapping[str, Node], policy: Policy) -> tuple[Fact, ...]:
    """Return the first reservation of each barred node that would suit the job."""
    found = []
    for i in barred(job, known, policy):
        one = known[i]
        if one.alive and not one.cordoned and suits(job, one):
            first = min((r for r in one.reservations if r.end > NOW), key=lambda r: (r.start, r.id))
            begun = any(r.start <= NOW < r.end for r in one.reservations)
            seconds = expected(job, policy, NOW)
            found.append(NodeReserved(node=one.name, start=first.start, end=first.end, seconds=seconds, begun=begun))
    return tuple(sorted(found, key=lambda fact: (fact.start, fact.node)))


def closed_for(job: Job, known: Mapping[str, Node]) -> tuple[Fact, ...]:
    """Return the nodes that are down or cordoned and would suit the job."""
    found = []
    for one in known.values():
        whole = Left(one.cpus, one.gpus, one.memory_bytes)
        if (one.cordoned or not one.alive) and suits(job, one) and whole.holds(job):
            found.append(NodeClosed(node=one.name, state=Closure.CORDONED if one.alive else Closure.DOWN))
    return tuple(found)


def suits(job: Job, one: Node) -> bool:
    model = job.spec.resources.resources_per_worker.gpu_model
    pins = job.spec.resources.nodes
    there = not pins or one.name in pins
    there = there and all(one.labels.get(key) == value for key, value in job.spec.resources.node_labels.items())
    return (
        there and one.shares_home and (model is None or any(model.lower() in known.lower() for known in one.gpu_models))
    )


def rooms(job: Job, left: Mapping[str, Left], known: Mapping[str, Node]) -> dict[str, int]:
    """Return the number of ranks for which each node has room, by placing them one by one."""
    found = {}
    for node_id, there in left.items():
        trial, count = Left(there.cpus, there.gpus, there.memory), 0
        while suits(job, known[node_id]) and trial.holds(job):
            trial.take(job)
            count += 1
        if count:
            found[node_id] = count
    return found


def place(job: Job, left: Mapping[str, Left], known: Mapping[str, Node]) -> tuple[str, ...] | None:
    room, ranks, strategy = rooms(job, left, known), ranks_of(job), job.spec.resources.placement_strategy
    roomy = sorted(room, key=lambda n: (-room[n], n))
    packs = strategy in ("PACK", "STRICT_PACK")
    if packs and any(room[n] >= ranks for n in room):
        return (min((n for n in room if room[n] >= ranks), key=lambda n: (room[n], n)),) * ranks
    if strategy == "STRICT_PACK" or sum(room.values()) < ranks or (strategy == "STRICT_SPREAD" and len(room) < ranks):
        return None
    keys = topology_levels(known)
    if keys and ranks > 1 and (packs or len(room) >= ranks):
        return near(ranks, room, known, keys, spread=not packs)
    counts = dict.fromkeys(roomy, 0)
    while sum(counts.values()) < ranks:
        for n in roomy:  # one rank in turn when they spread, else as many as the node has room for
            most = room[n] if packs else counts[n] + 1
            while counts[n] < min(most, room[n]) and sum(counts.values()) < ranks:
                counts[n] += 1
    return tuple(n for n in roomy for _ in range(counts[n]))


def topology_levels(known: Mapping[str, Node]) -> list[str]:
    """Return the keys of topology labels, the one with the fewest values first."""
    values: dict[str, set[str]] = {}
    for one in known.values():
        for key, value in one.labels.items():
            if key.startswith("topology."):
                values.setdefault(key, set()).add(value)
    return sorted(values, key=lambda key: (len(values[key]), key))


def near(
    ranks: int, room: Mapping[str, int], known: Mapping[str, Node], keys: Sequence[str], *, spread: bool
) -> tuple[str, ...]:
    """Place on as few groups as possible: all but one are the roomiest, and one is the tightest for the rest."""
    roomy = sorted(room, key=lambda n: (-room[n], n))
    if not keys:
        tight = [n for n in roomy if room[n] >= ranks]
        if spread or not tight:
            return tuple(n for n in roomy for _ in range(1 if spread else room[n]))[:ranks]
        return (min(tight, key=lambda n: (room[n], n)),) * ranks
    groups: dict[tuple[str, str], list[str]] = {}
    for n in room:
        value = known[n].labels.get(keys[0])
        groups.setdefault(("", n) if value is None else (value, ""), []).append(n)
    sizes = {group: sum(1 if spread else room[n] for n in there) for group, there in groups.items()}
    fewest = next(
        count
        for count in range(1, len(groups) + 1)
        if any(sum(sizes[group] for group in some) >= ranks for some in combinations(groups, count))
    )
    chosen = sorted(groups, key=lambda group: (-sizes[group], group))[: fewest - 1]
    rest = ranks - sum(sizes[group] for group in chosen)
    others = [group for group in groups if group not in chosen and sizes[group] >= rest]
    chosen.append(min(others, key=lambda group: (sizes[group], group)))
    parts = [sizes[group] for group in chosen[:-1]] + [rest]
    return tuple(
        place
        for group, part in zip(chosen, parts, strict=True)
        for place in near(part, {n: room[n] for n in groups[group]}, known, keys[1:], spread=spread)
    )


def claim(job: Job, left: Mapping[str, Left], known: Mapping[str, Node]) -> bool:
    """Set aside free resources for the job; return whether some of its ranks have no room."""
    room, missing = rooms(job, left, known), ranks_of(job)
    for node_id in sorted(left, key=lambda n: -_room(job, left[n])):
        taken = min(missing, room.get(node_id, 0))
        left[node_id].take(job, taken)
        missing -= taken
    for node_id, there in left.items():
        if missing and need(job)[1] and suits(job, known[node_id]):
            there.gpus = 0.0
    return missing > 0


def _room(job: Job, there: Left) -> int:
    trial, count = Left(there.cpus, there.gpus, there.memory), 0
    while trial.holds(job):
        trial.take(job)
        count += 1
    return count


def answer(jobs: Sequence[Job], known: Mapping[str, Node], policy: Policy | None = None) -> Answer:
    """Return the decision by the rules, recomputed for each job."""
    policy = policy or Policy(Sharing(), PastUse(), known)
    holding = [job for job in jobs if job.nodes]
    waiting = [job for job in jobs if not job.nodes]
    left = all_left(known, holding)
    found = Answer([], [], {})
    overdue = policy.overdue(waiting)
    placed: list[Job] = []
    short: list[Job] = []
    remaining = list(waiting)
    full: set[object] = set()
    loose = all_left(known, holding)  # resources beside the placed jobs, without claims
    until: list[float | None] = []
    bounded = False
    told: dict[object, Fact] = {}  # reasons that are the same for equal jobs of a user
    passed_by: list[Job] = []  # jobs that did not fit, which only jobs of their queue and priority may delay
    turns = 0
    turn: tuple[Job, SharingPlan] | None = None  # the first job for which others stop by time sharing
    while remaining:
        having = holding + placed
        job = overdue.pop(0) if overdue else min(remaining, key=lambda one: policy.place_of(one, having))
        remaining.remove(job)
        cpus, gpus, _ = need(job)
        ranks = ranks_of(job)
        limit = policy.limit(job, having)
        shape, lane = shape_of(job, known, policy), lane_of(job)
        equal = (
            lane,
            shape[:-1],
            ranks,
            job.spec.resources.placement_strategy,
            job.spec.max_duration,
            policy.kind(job),
        )
        if job.not_before <= NOW and equal not in told and limit is None and _unequal(job, passed_by, policy):
            for other in passed_by:
                its_shape = shape_of(other, known, policy)
                if its_shape not in full and claim(other, usable(other, left, known, policy), known):
                    full.add(its_shape)
            passed_by.clear()
        may = usable(job, left, known, policy)
        closed = tuple(barred(job, known, policy))
        spot = place(job, may, known)
        wanted = job.spec.resources
        labels = labels_of(job)
        between = (
            place(job, usable(job, loose, known, policy), known)
            if short and job.spec.max_duration is not None
            else None
        )
        if job.not_before > NOW:
            found.waiting[job.id] = BackingOff(seconds=job.not_before - NOW, cause=job.reason)
        elif equal in told:
            found.waiting[job.id] = told[equal]
        elif limit is not None:
            found.waiting[job.id] = told[equal] = limit
        elif spot is not None:
            found.starts.append((job.id, spot))
            placed.append(job)
            for node_id in spot:
                left[node_id].take(job)
                loose[node_id].take(job)
        elif place(job, all_left(known, [], empty=True), known) is None:
            back = {name: replace(one, alive=True) for name, one in known.items()}
            whole, room = (find(job, all_left(back, [], empty=True), back) for find in (place, rooms))
            down = tuple(sorted({one.name for one in known.values() if not one.alive and one.id in room}))
            needs = {"gpus": gpus * ranks, "cpus": cpus * ranks}
            never: Fact = AwaitsNodes(nodes=down, **needs) if down and whole else DoesNotFit(**needs)
            if not any(all(f"{k}={v}" in _words(one) for k, v in wanted.node_labels.items()) for one in known.values()):
                never = NoNodeWithLabels(labels=labels)
            found.waiting[job.id] = told[equal] = never
        elif between is not None and _backfills(
            job, short, holding, placed, found, known, policy, waiting, until, turn
        ):
            found.starts.append((job.id, between))
            found.backfilled += 1
            placed.append(job)
            for node_id in between:
                left[node_id].take(job)
                loose[node_id].take(job)
        else:
            free = [sum(max(0.0, there.gpus) for there in left.values()), sum(max(0.0, x.cpus) for x in left.values())]
            found.waiting[job.id] = NotEnoughFree(
                gpus=gpus * ranks,
                cpus=cpus * ranks,
                free_gpus=free[0],
                free_cpus=free[1],
                labels=labels,
                reserved=reserved_for(job, known, policy),
                closed=closed_for(job, known),
            )
            short.append(job)
            if len(short) == 1:
                bounded = _bounded(job, holding, found.starts, placed, known, policy)
            turns += 0 if turn else 1
            mine = None if turn or turns > 8 else _turn(job, holding, placed, found.starts, known, policy)
            turn = turn or (mine and (job, mine))
            keeps = mine is not None or bounded or _claims(job, holding, policy)
            if not keeps:
                passed_by.append(job)
            if shape in full or (keeps and claim(job, may, known)):
                full.add(shape)
            if (shape in full or not keeps) and not (closed and policy.ran_class(job)):
                told[equal] = found.waiting[job.id]
    found.closing = {job.id for job in holding if any(_begun(known[i]) for i in job.nodes)}
    if not found.starts and not found.closing:
        stops = _preempt(short[:1], holding, [], known, found, policy, {job.spec.queue for job in waiting})
        if turn is not None and not stops and turn[1].stop:
            found.shared = [one.id for one in turn[1].stop]
            found.waiting[turn[0].id] = AwaitsRoom(jobs=tuple(found.shared))
    return found


def labels_of(job: Job) -> tuple[str, ...]:
    wanted = job.spec.resources.node_labels
    return tuple(f"{key}={wanted[key]}" for key in sorted(wanted))


def lane_of(job: Job) -> tuple[str, str, int]:
    return job.spec.queue, job.submission.user, job.priority


def shape_of(job: Job, known: Mapping[str, Node], policy: Policy) -> tuple[object, ...]:
    """Return the values that decide where ranks of the job have room."""
    wanted = job.spec.resources
    model = wanted.resources_per_worker.gpu_model
    return need(job), model, wanted.nodes, labels_of(job), tuple(barred(job, known, policy))


def _unequal(job: Job, passed_by: Sequence[Job], policy: Policy) -> bool:
    several = bool(policy.sharing.queues)  # without queues in the settings, all jobs are in one
    return any(one.priority != job.priority or (several and one.spec.queue != job.spec.queue) for one in passed_by)


def _claims(job: Job, holding: Sequence[Job], policy: Policy) -> bool:
    """Return whether free resources are kept for a job that does not fit: others stop for it, or it has waited for long."""
    served = any(getattr(one.stop.by, "job", None) == job.id for one in holding if one.stop is not None)
    return served or NOW - waits_since(job) >= 10 * policy.sharing.ageing


def _bounded(
    head: Job,
    holding: Sequence[Job],
    starts: Sequence[tuple[str, tuple[str, ...]]],
    placed: Sequence[Job],
    known: Mapping[str, Node],
    policy: Policy,
) -> bool:
    """Return whether the head fits at the latest when every job has reached its limit; jobs without a limit run on."""
    limits = {
        one.id: max(NOW, one.attempt.running_at + one.spec.max_duration.total_seconds())
        for one in holding
        if one.spec.max_duration is not None and one.attempt is not None and one.attempt.running_at is not None
    }
    opens = {r.end for one in known.values() for r in one.reservations if r.end > NOW and not _begun(one)}
    for at in sorted(set(limits.values()) | opens):
        there = all_left(known, [one for one in holding if limits.get(one.id, at + 1) > at])
        for job, (_, spot) in zip(placed, starts, strict=True):
            for node_id in spot:
                there[node_id].take(job)
        if place(head, usable(head, there, known, policy, at), known) is not None:
            return True
    return False


def _words(one: Node) -> list[str]:
    return [f"{key}={value}" for key, value in one.labels.items()]


def _backfills(
    job: Job,
    short: Sequence[Job],
    holding: Sequence[Job],
    placed: Sequence[Job],
    found: Answer,
    known: Mapping[str, Node],
    policy: Policy,
    waiting: Sequence[Job],
    until: list[float | None],
    turn: tuple[Job, SharingPlan] | None,
) -> bool:
    """Return whether the job ends before the head can start, a time that is computed on first use."""
    if not until:
        trial = Answer([], [], {})
        queues = {one.spec.queue for one in waiting}
        due = _preempt(short[:1], holding, list(zip(placed, found.starts, strict=True)), known, trial, policy, queues)
        at = due if turn is None else turn[1].at
        ends = _reserved(short[0], holding, found.starts, placed, known, policy)
        known_ends = [one for one in (at if isinstance(at, float) else None, ends) if one is not None]
        other = turn is not None and turn[0] is not short[0]
        until.append(None if trial.stops or other else min(known_ends, default=None))
    assert job.spec.max_duration is not None
    began = NOW if job.started_at is None else job.started_at
    ends = max(NOW, began + job.spec.max_duration.total_seconds())
    return until[0] is not None and ends <= until[0]


def _reserved(
    head: Job,
    holding: Sequence[Job],
    starts: Sequence[tuple[str, tuple[str, ...]]],
    placed: Sequence[Job],
    known: Mapping[str, Node],
    policy: Policy,
) -> float | None:
    """Return the time at which the head fits as running jobs end; jobs that were just placed run on."""
    ends = sorted((_ends_at(job, policy), job.submission.sequence, job) for job in holding)
    opens = {r.end for one in known.values() for r in one.reservations if not _begun(one)}
    for at in sorted({at for at, _, _ in ends} | {at for at in opens if at > NOW}):
        there = all_left(known, [job for ends_at, _, job in ends if ends_at > at])
        for job, (_, spot) in zip(placed, starts, strict=True):
            for node_id in spot:
                there[node_id].take(job)
        if place(head, usable(head, there, known, policy, at), known) is not None:
            return at
    return None


def _begun(one: Node) -> bool:
    return any(r.start <= NOW < r.end for r in one.reservations)


def _ends_at(job: Job, policy: Policy) -> float:
    """Return the end of a job: its limit, the median of like jobs that ran longer, or as long again as it has run."""
    assert job.attempt is not None
    assert job.attempt.running_at is not None
    ran = NOW - job.attempt.running_at
    times = policy.past.run_times.known.get(Like(job.submission.user, job.name), ())
    longer = [seconds for seconds in times if seconds > ran]
    again = NOW + (statistics.median(longer) - ran if len(times) >= 3 and longer else ran)
    limit = job.spec.max_duration
    return again if limit is None else min(again, max(NOW, job.attempt.running_at + limit.total_seconds()))


def _preempt(
    head: Sequence[Job],
    holding: Sequence[Job],
    placed: Sequence[tuple[Job, tuple[str, tuple[str, ...]]]],
    known: Mapping[str, Node],
    found: Answer,
    policy: Policy,
    waiting: set[str],
) -> bool | float:
    """Stop jobs for the head; return whether any stop or will, or when they will have saved. With ``placed``, idle jobs stay."""
    for job in head:
        able = sorted((one for one in holding if one.spec.preemptible), key=_loss)
        may = policy.victims(job, able, [*holding, *(one for one, _ in placed)], waiting)

        def fits(gone: Sequence[Job], job: Job = job) -> bool:
            left = all_left(known, [one for one in holding if one not in gone])
            for one, (_, spot) in placed:
                for node_id in spot:
                    left[node_id].take(one)
            return place(job, usable(job, left, known, policy), known) is not None

        if (reclaimed := _idle(holding, policy, fits)) and not placed and found.starts == [] and found.waiting:
            found.reclaimed = [one.id for one in reclaimed]
            found.waiting[job.id] = AwaitsRoom(jobs=tuple(found.reclaimed))
            return True
        chosen = [] if fits([]) else _fewest(may, fits)
        saving = [at for one in chosen if (at := _saves_soon(one)) is not None]
        if chosen and saving:
            return min(saving)
        if chosen:
            found.stops = [one.id for one in chosen]
            found.waiting[job.id] = AwaitsRoom(jobs=tuple(one.id for one in chosen))
            return True
    return False


def _fewest(able: Sequence[Job], fits: Callable[[Sequence[Job]], bool]) -> list[Job]:
    """Return the first jobs without which it fits, less those that are not needed."""
    chosen = next((list(able[:count]) for count in range(1, len(able) + 1) if fits(able[:count])), [])
    for one in chosen[-2::-1]:
        fewer = [other for other in chosen if other is not one]
        chosen = fewer if fits(fewer) else chosen
    return chosen


def _saves_soon(job: Job) -> float | None:
    """Return when a job that is about to save has saved: within a minute, and sooner than it has been without a save."""
    assert job.attempt is not None
    assert job.attempt.running_at is not None
    saved = job.checkpoints.durable_at
    if saved is None or saved < job.attempt.running_at:
        return None
    every = saved - job.attempt.running_at
    at = saved + every + min(10.0, every / 10)
    return at if NOW < at <= NOW + 60 and at - NOW < NOW - saved else None


@dataclass
class SharingPlan:
    """Jobs that stop for one by time sharing now, and when all that it needs have stopped."""

    stop: list[Job]
    at: float


def _turn(
    job: Job,
    holding: Sequence[Job],
    placed: Sequence[Job],
    starts: Sequence[tuple[str, tuple[str, ...]]],
    known: Mapping[str, Node],
    policy: Policy,
) -> SharingPlan | None:
    """Return which jobs of higher levels, and of the same user or of one with a larger share, stop when they have saved."""
    having = [*holding, *placed]
    aged = NOW - waits_since(job) >= 10 * policy.sharing.ageing
    able: list[tuple[float, tuple[float, float, int], Job]] = []
    for one in holding:
        assert one.attempt is not None
        assert one.attempt.running_at is not None
        began, saved = one.attempt.running_at, one.checkpoints.durable_at
        if not one.spec.preemptible or saved is None or saved < began or one.priority > job.priority:
            continue
        at = NOW if NOW - saved <= 60 else saved + (saved - began) + min(10.0, (saved - began) / 10)
        same = not policy.sharing.queues or one.spec.queue == job.spec.queue
        larger = one.submission.user == job.submission.user or policy.user_share(one, having) > policy.user_share(
            job, having
        )
        higher = policy.level_of(one, policy.class_of(NOW - began)) > policy.level(job)
        if same and (aged or (higher and larger)) and NOW <= at <= NOW + 3600:
            able.append((at, _loss(one), one))
    able.sort(key=lambda entry: entry[:2])

    def fits(gone: Sequence[Job]) -> bool:
        left = all_left(known, [one for one in holding if one not in gone])
        for one, (_, spot) in zip(placed, starts, strict=True):
            for node_id in spot:
                left[node_id].take(one)
        return place(job, usable(job, left, known, policy), known) is not None

    chosen = [] if fits([]) else _fewest([one for _, _, one in able], fits)
    times = {one.id: at for at, _, one in able}
    if not chosen:
        return None
    return SharingPlan([one for one in chosen if times[one.id] <= NOW], max(times[one.id] for one in chosen))


def _idle(holding: Sequence[Job], policy: Policy, fits: Callable[[Sequence[Job]], bool]) -> list[Job]:
    """Return the fewest jobs that have been idle for too long without which it fits, the longest idle first."""
    due = []
    for job in holding:
        limit = job.spec.reclaim_idle.total_seconds() if job.spec.reclaim_idle else policy.sharing.reclaim_idle
        since = policy.idle.get(job.id)
        if job.spec.preemptible and limit is not None and since is not None and since + limit <= NOW:
            due.append((since, job.submission.sequence, job))
    able = [job for _, _, job in sorted(due, key=lambda entry: entry[:2])]
    return [] if fits([]) else _fewest(able, fits)


def _loss(job: Job) -> tuple[float, float, int]:
    assert job.attempt is not None
    assert job.attempt.running_at is not None
    seconds = NOW - max(job.attempt.running_at, job.checkpoints.durable_at or 0.0)
    cpus, gpus, _ = need(job)
    return ranks_of(job) * gpus * seconds, ranks_of(job) * cpus * seconds, -job.submission.sequence


def random_case(seed: int) -> tuple[list[Job], dict[str, Node], Policy]:
    """Return nodes, jobs that run on them, a queue with many equal jobs, and the policy of sharing."""
    choose = random.Random(seed)
    users, names = (
        choose.choice([["ada"], ["ada", "bob", "eve"]]),
        choose.choice([["default"], ["a", "b", "c", "odd"]]),
    )
    scattered = choose.random() < 0.4
    least = 3 if scattered else 1
    known = nodes(*(_random_node(choose, name) for name in "abcdef"[: choose.randint(least, 6)]))
    kinds = [_random_spec(choose, names) for _ in range(choose.randint(1, 4))]
    last: list[Any] = []
    if choose.random() < 0.5:  # a large gang that waits, and small ones that end soon
        brief = [
            make_spec(workers=1, queue=names[0], max_duration=timedelta(seconds=n), name="plain") for n in (20, 60, 400)
        ]
        limit = choose.choice([None, timedelta(seconds=10)])
        large = make_spec(workers=choose.choice([4, 6, 8]), queue=names[0], max_duration=limit, name="plain")
        kinds += [*brief, large]
        last = [large, *choose.choices(brief, k=2)]
    if scattered:  # scattered small jobs, and a large one that waits for the room between them
        known, kinds, last = _scattered(choose, names, known)
    jobs: list[Job] = []
    for number in range(2 * len(known) if scattered else choose.randint(1, 14)):
        spec = choose.choice(kinds)
        job = pending(spec, sequence=number + 1, job_id=f"job-{number}", user=choose.choice(users))
        before = {i: replace(one, reservations=()) for i, one in known.items()}
        left = all_left(before, [one for one in jobs if one.nodes])
        if scattered:
            left = {i: left[i] for i in choose.sample(sorted(left), k=min(len(left), choose.choice([1, 1, 1, 2])))}
        spot = place(job, left, known)
        if spot is not None and choose.random() < (0.95 if scattered else 0.6):
            limit = job.spec.max_duration
            longest = 990 if limit is None else int(limit.total_seconds()) - 1
            job = running(job, nodes=spot, at=NOW - choose.randint(longest // 2 if scattered else 1, longest))
            if choose.random() < (0.9 if scattered else 0.5):
                job = after(job, checkpoint(job, 5, path="/c", at=NOW - choose.randint(1, 90)))
        elif scattered and choose.random() < 0.9:
            continue
        elif choose.random() < 0.1:
            job = changed(job, not_before=NOW + 5)
        elif choose.random() < 0.2:
            job = _preempted(job, NOW - choose.choice([1, 400]), choose.choice([5, 90, 500]))
        jobs.append(job)
    jobs += [pending(spec, sequence=90 + n, job_id=f"last-{n}", user=users[0]) for n, spec in enumerate(last)]
    choose.shuffle(jobs)
    policy = random_policy(choose, users, names, known)
    policy.idle = {job.id: NOW - choose.choice([30, 300, 900]) for job in jobs if job.nodes and choose.random() < 0.2}
    policy.sharing = replace(policy.sharing, reclaim_idle=choose.choice([None, None, 60.0, 600.0]))
    if scattered and choose.random() < 0.8:
        policy.sharing = replace(policy.sharing, user_jobs=None, user_gpus=None, reclaim_idle=None)
    return jobs, known, policy


def _scattered(
    choose: random.Random, names: Sequence[str], known: Mapping[str, Node]
) -> tuple[dict[str, Node], list[Any], list[Any]]:
    """Return nodes of which most can be used, kinds of small jobs, and a large one."""
    few = {"reservations": (), "labels": {}, "cordoned": False} if choose.random() < 0.8 else {}
    found = {
        i: replace(one, gpus=choose.choice([4.0, 4.0, 5.0]), cpus=64.0, alive=True, shares_home=True, **few)
        for i, one in known.items()
    }
    kinds: list[Any] = [_random_spec(choose, names, small=True) for _ in range(3)]
    strict = choose.random() < 0.5
    large = make_spec(
        queue=names[0],
        priority=choose.choice([50, 60]),
        gpu=1 if strict else choose.choice([2, 4]),
        workers=4 if strict else choose.choice([1, 1, 2]),
        strategy="STRICT_PACK" if strict else choose.choice(["PACK", "SPREAD", "STRICT_SPREAD"]),
    )
    return found, kinds, [large]


def _preempted(job: Job, at: float, seconds: float) -> Job:
    """Return the job after it ran for ``seconds`` and was preempted."""
    job = running(job, at=at - seconds)
    job = after(job, stop(job, StopPurpose.PREEMPT, at=at), gone(job, at=at), released(job, at=at))
    return after(job, ev.JobRequeued(job_id=job.id, at=at, reason=MadeRoom(by=ByUser(name="ada"))))


def _random_node(choose: random.Random, name: str) -> Node:
    return node(
        name,
        gpus=choose.choice([0, 2, 4, 8]),
        cpus=choose.choice([2, 8, 64]),
        cordoned=choose.random() < 0.1,
        alive=choose.random() < 0.95,
        shares_home=choose.random() < 0.9,
        gpu_models=(choose.choice(["NVIDIA H100", "NVIDIA A100"]),),
        labels=_random_labels(choose),
        reservations=_random_reservations(choose),
    )


def _random_reservations(choose: random.Random) -> tuple[NodeReservation, ...]:
    """Return no reservation for most nodes; for the others one that has begun, one that begins during jobs, or two."""
    if choose.random() < 0.75:
        return ()
    starts = choose.choice([[-5], [25], [150], [350], [1500], [10, 800]])
    return tuple(
        NodeReservation(id=f"r{n}", start=NOW + start, end=NOW + start + choose.choice([60, 500]))
        for n, start in enumerate(starts)
    )


def _random_labels(choose: random.Random) -> dict[str, str]:
    """Return labels of a random rack and its zone, and of a disk; each may be missing."""
    rack = choose.choice("qrs")
    found = {"disk": choose.choice(["nvme", "nvme", "ssd"])} if choose.random() < 0.5 else {}
    if choose.random() < 0.6:
        found["topology.rack"] = rack
    if choose.random() < 0.4:
        found["topology.zone"] = choose.choice("xy") if choose.random() < 0.2 else "x" if rack == "q" else "y"
    return found


def _random_spec(choose: random.Random, names: Sequence[str], *, small: bool = False) -> object:
    gpu = choose.choice([1, 1, 1, 2]) if small else choose.choice([0, 1, 1, 1, 2])
    return make_spec(
        name=choose.choice(NAMES),
        workers=choose.choice([1, 1, 1, 2]) if small else choose.choice([1, 1, 2, 3, 4, 8]),
        gpu=gpu,
        cpu=choose.choice([1, 1, 2, 4]),
        memory_bytes=None if small else choose.choice([None, None, 2**34, 2**37]),
        gpu_model=choose.choice([None, None, "H100"]) if gpu and not small else None,
        nodes=choose.choice([(), (), (), ("a",), ("a", "c")]) if not small or choose.random() < 0.2 else (),
        node_labels={} if small else choose.choice([{}, {}, {}, {}, {"disk": "nvme"}, {"disk": "tape"}]),
        strategy=choose.choice(["PACK", "PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]),
        priority=choose.choice([50, 50, 60]),
        queue=choose.choice(names),
        preemptible=choose.random() < 0.8,
        reclaim_idle=choose.choice([None, None, None, timedelta(seconds=200)]),
        max_duration=choose.choice([None, None, timedelta(seconds=30), timedelta(seconds=300)]),
    )


def differences(first: int, count: int) -> list[int]:
    """Return the cases that the production scheduler decides differently."""
    return [seed for seed in range(first, first + count) if not same(seed)]


def same(seed: int) -> bool:
    jobs, known, policy = random_case(seed)
    state = State(
        jobs={job.id: job for job in jobs}, nodes=known, sharing=policy.sharing, past=policy.past, idle=policy.idle
    )
    commands = decide(state, NOW)
    wanted = answer(jobs, known, policy)
    starts = [(e.job_id, e.nodes) for e in commands.events if isinstance(e, ev.AttemptStarted)]
    asked = [event for event in commands.events if isinstance(event, ev.StopRequested)]
    stops = [e.job_id for e in asked if isinstance(e.by, ByPreemption)]
    closing = {e.job_id for e in asked if isinstance(e.by, ByNodeReservation)}
    reclaimed = [e.job_id for e in asked if isinstance(e.by, ByIdleReclaim)]
    shared = [e.job_id for e in asked if isinstance(e.by, ByTimeSharing)]
    known_kinds = len(stops) + len(closing) + len(reclaimed) + len(shared) == len(asked)
    whole = len(starts) + len(asked) == len(commands.events) and known_kinds
    found = (starts, stops, closing, reclaimed, shared, commands.waiting)
    return whole and found == (
        wanted.starts,
        wanted.stops,
        wanted.closing,
        wanted.reclaimed,
        wanted.shared,
        wanted.waiting,
    )


if __name__ == "__main__":
    different = differences(0, int(sys.argv[1]))
    print(f"{sys.argv[1]} cases; decided otherwise: {different or 'none'}")
    sys.exit(bool(different))
