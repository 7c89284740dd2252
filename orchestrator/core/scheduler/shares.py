"""The queues between which an installation shares its GPUs, past use, fair shares, quotas and limits. Pure.

Amounts are vectors of GPUs, CPUs and bytes of memory. Divided by what the cluster has, the largest part is the *dominant* one.
A share is a queue's or user's part of the cluster in its dominant resource: what it holds now, plus its mean over the
past in which older seconds count less (half of it is forgotten every half-life). So two users or queues that both wait
get even shares over time, not only at each moment, and what a job takes counts at once.

Let h be what is held, and H the half-life. A gang of size r that began at b adds r (1 - 2**((b - t) / H)) to the mean
at t. So the mean is h - 2**((s - t) / H) q, where q, the sum of r 2**((b - s) / H), is kept for a fixed time s: a
change updates only its account, and the passing of time updates none. ``PastUse`` has the use by gangs that are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf, log
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core import events as ev
from orchestrator.core.cluster import EPSILON
from orchestrator.core.facts.reasons import QueueAtMaximum, UserAtLimit
from orchestrator.core.scheduler.durations import RunTimeHistory, RunTimes
from orchestrator.core.scheduler.placement import rank_size
from orchestrator.spec.queues import DEFAULT_QUEUE, QueueSpec, guarantee

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Attempt, Job

HALF_LIFE_SECONDS: Final = 7 * 86400.0
AGEING_SECONDS: Final = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Settings for sharing GPUs: queues (none: all jobs are in one), how fast use is forgotten, ageing, user limits.

    ``user_jobs`` and ``user_gpus`` limit what a user runs at once; None is no limit. ``reclaim_idle`` is how many
    seconds all GPUs of a running job may be idle while others wait; None: forever.
    """

    queues: tuple[QueueSpec, ...] = ()
    half_life: float = HALF_LIFE_SECONDS
    ageing: float = AGEING_SECONDS
    user_jobs: int | None = None
    user_gpus: int | None = None
    reclaim_idle: float | None = None


class QueueTree:
    """The queues of a ``Sharing`` by name, with what follows from their parents.

    A job's queue that is not configured (it was accepted before there were queues) counts as an uppermost one of weight 1.
    """

    def __init__(self, queues: tuple[QueueSpec, ...]) -> None:
        self._specs = {queue.name: queue for queue in queues}
        self.configured = bool(queues)
        self.guaranteed = {queue.name: guarantee(queue, queues) for queue in queues}
        self.bounded = any(queue.maximum is not None for queue in queues)
        self._paths: dict[str, tuple[QueueSpec, ...]] = {}

    def queue_of(self, job: Job) -> str:
        """Return the queue in which the job counts; "" when none is configured."""
        return job.spec.queue if self.configured else ""

    def are_equals(self, one: Job, other: Job) -> bool:
        """Whether two jobs are of one queue and priority."""
        return one.priority == other.priority and self.queue_of(one) == self.queue_of(other)

    def path(self, name: str) -> tuple[QueueSpec, ...]:
        """Return a queue and those above it, the uppermost first; nothing when none is configured."""
        if not self.configured:
            return ()
        if name not in self._paths:
            found = [self._specs.get(name) or QueueSpec(name=name)]
            while found[0].parent:
                found.insert(0, self._specs[found[0].parent])
            self._paths[name] = tuple(found)
        return self._paths[name]

    def below(self, parent: str) -> list[QueueSpec]:
        """Return the configured queues under one; under "" the uppermost ones."""
        return [queue for queue in self._specs.values() if queue.parent == parent]

    def refusal(self, name: str) -> str | None:
        """Return why no job can be submitted to this queue; None when one can."""
        if not self.configured or name == DEFAULT_QUEUE:
            return None
        inner = sorted(queue.name for queue in self.below(name))
        if inner:
            return f"queue {name!r} has queues below it: name one of {', '.join(inner)}"
        if name not in self._specs:
            leaves = sorted({n for n in self._specs if not self.below(n)} | {DEFAULT_QUEUE})
            return f"there is no queue {name!r}; the queues are {', '.join(leaves)}"
        return None


MAX_HALVINGS: Final = 100.0
"""Number of half-lives after which use is counted from a new time, before weights become too large."""


class Amounts(NamedTuple):
    """GPUs, CPUs and memory, or seconds of them."""

    gpus: float = 0.0
    cpus: float = 0.0
    memory: float = 0.0

    def plus(self, other: Amounts, factor: float = 1.0) -> Amounts:
        """Return the sum of these and ``factor`` times the other amounts."""
        return Amounts(
            self.gpus + factor * other.gpus, self.cpus + factor * other.cpus, self.memory + factor * other.memory
        )

    def dominant(self, of: Amounts) -> float:
        """Return the largest of the fractions that these amounts are of ``of``."""
        return max(
            self.gpus / of.gpus if of.gpus > 0 else 0.0,
            self.cpus / of.cpus if of.cpus > 0 else 0.0,
            self.memory / of.memory if of.memory > 0 else 0.0,
        )


class Account(NamedTuple):
    """The queue, as a job.yaml names it, and the user to which use is counted."""

    queue: str
    user: str


@dataclass(frozen=True, slots=True)
class Used:
    """Resource seconds, each weighted as it counts at the time ``at``."""

    at: float
    amounts: Amounts

    def by(self, now: float, half_life: float) -> Amounts:
        """Return the part that counts at ``now``."""
        return Amounts().plus(self.amounts, _fade(now - self.at, half_life))


@dataclass(frozen=True, slots=True, kw_only=True)
class PastUse:
    """The past as decisions use it: what ended gangs have ``used``, when jobs last ``started``, and run times.

    ``started`` is by queue, user and priority.
    """

    used: Mapping[Account, Used] = field(default_factory=dict)
    started: Mapping[tuple[str, str, int], float] = field(default_factory=dict)
    run_times: RunTimes = field(default_factory=RunTimes)


def _fade(seconds: float, half_life: float) -> float:
    return float(0.5 ** (max(0.0, seconds) / half_life))


def span_seconds(began: float, ended: float, now: float, half_life: float) -> float:
    """Return the seconds from ``began`` to ``ended`` as they count at ``now``: the integral of their weights."""
    if ended <= began:
        return 0.0
    return half_life / log(2) * (_fade(now - ended, half_life) - _fade(now - began, half_life))


def account_of(job: Job) -> Account:
    """Return the account to which the job's use is counted."""
    return Account(job.spec.queue, job.submission.user)


def amounts_of(job: Job, ranks: int) -> Amounts:
    """Return what this number of the job's ranks holds."""
    cpus, gpus, memory = rank_size(job)
    return Amounts(ranks * gpus, ranks * cpus, float(ranks * memory))


def capacity_of(nodes: Mapping[str, Node]) -> Amounts:
    """Return the resources of the nodes that accept new ranks."""
    there = [node for node in nodes.values() if node.schedulable]
    return Amounts(sum(n.gpus for n in there), sum(n.cpus for n in there), float(sum(n.memory_bytes for n in there)))


def gang_began(job: Job) -> float | None:
    """Return when the newest gang was ordered; None before the first."""
    return next((attempt.started_at for attempt in job.attempts if attempt.gang == job.gang), None)


class UseHistory:
    """Learns from events what jobs have used; ``remember`` rebuilds it from records."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._held: dict[JobId, tuple[int, float, Amounts]] = {}
        self._used: dict[Account, Used] = {}
        self._started: dict[tuple[str, str, int], float] = {}
        self._run_times = RunTimeHistory()

    def observe(self, job: Job, event: ev.Event) -> bool:
        """Record a folded event and the job's record after it; return whether what is known of the past has changed."""
        before = self._held.get(job.id)
        closes = before is not None and (not job.gang_open or before[0] != job.gang)
        if closes:
            self.released(job, event.at)
        starts = isinstance(event, ev.AttemptStarted)
        if starts:
            self._start(job, event.at)
        if job.gang_open and job.id not in self._held:
            self._held[job.id] = (job.gang, event.at, amounts_of(job, len(job.nodes)))
        if isinstance(event, ev.JobFinished):
            self._run_times.ended(job)
        return closes or starts

    def released(self, job: Job, at: float) -> None:
        """Record that a job has released the gang that it held."""
        _, began, amounts = self._held.pop(job.id)
        self._add(account_of(job), began, at, amounts)

    def remember(self, jobs: Iterable[Job]) -> None:
        """Count earlier use: the attempts that the jobs' records list, and the gangs that they hold."""
        found = list(jobs)
        self._run_times.remember(job for job in found if job.state.is_terminal)
        for job in found:
            for attempt in job.attempts:
                self._start(job, attempt.started_at)
                if not (job.gang_open and attempt.gang == job.gang):
                    self._add_attempt(job, attempt)
            began = gang_began(job)
            if job.gang_open and began is not None:
                self._held[job.id] = (job.gang, began, amounts_of(job, len(job.nodes)))

    def view(self) -> PastUse:
        """Return what is known now, as a value."""
        return PastUse(used=dict(self._used), started=dict(self._started), run_times=self._run_times.view)

    def _add_attempt(self, job: Job, attempt: Attempt) -> None:
        ended = attempt.ended_at if attempt.ended_at is not None else job.ended_at
        if ended is not None:
            self._add(account_of(job), attempt.started_at, ended, amounts_of(job, attempt.ranks))

    def _start(self, job: Job, at: float) -> None:
        key = (job.spec.queue, job.submission.user, job.priority)
        self._started[key] = max(at, self._started.get(key, at))

    def _add(self, account: Account, began: float, ended: float, amounts: Amounts) -> None:
        known = self._used.get(account, Used(ended, Amounts()))
        at = max(known.at, ended)
        seconds = span_seconds(began, ended, at, self._half_life)
        self._used[account] = Used(at, known.by(at, self._half_life).plus(amounts, seconds))


_DIGITS: Final = 9
"""Decimal places of a share: rounding errors of sums must not decide before the order of arrival does."""
PathKey = tuple[tuple[bool, float], ...]


@dataclass(slots=True)
class Held:
    """Gangs of an account: how many there are, what they hold, and q of the module's docstring (``begun``)."""

    gangs: int = 0
    amounts: Amounts = field(default_factory=Amounts)
    begun: Amounts = field(default_factory=Amounts)


class Accounts:
    """What the gangs of each queue and user hold. ``since`` is s of the module's docstring."""

    def __init__(self, jobs: Iterable[Job] = (), half_life: float = 1.0, since: float = 0.0) -> None:
        self.half_life = half_life
        self.since = since
        self.held: dict[Account, Held] = {}
        for job in jobs:
            self.count(job, 1)

    def outdated(self, half_life: float, now: float) -> bool:
        """Whether they must be counted anew, as the half-life or the clock has changed, or before weights become too large."""
        return half_life != self.half_life or not 0.0 <= now - self.since <= MAX_HALVINGS * half_life

    def count(self, job: Job, sign: int) -> None:
        """Add (1) or subtract (-1) the gang of a record."""
        account = account_of(job)
        held = self.held.setdefault(account, Held())
        held.gangs += sign
        if not held.gangs:
            del self.held[account]
            return
        amounts, began = amounts_of(job, len(job.nodes)), gang_began(job)
        weight = 2.0 ** (((self.since if began is None else began) - self.since) / self.half_life)
        held.amounts = held.amounts.plus(amounts, sign)
        held.begun = held.begun.plus(amounts, sign * weight)


class Shares:
    """The shares at ``now``: of what ``accounts`` hold, of past use, and of what a pass has ``started``."""

    def __init__(self, sharing: Sharing, past: PastUse, accounts: Accounts, capacity: Amounts, now: float) -> None:
        self.sharing = sharing
        self.tree = QueueTree(sharing.queues)
        self.capacity = capacity
        self.version = 0
        self._past = past
        self._accounts = accounts
        self._now = now
        self._started: dict[Account, Held] = {}
        self._known: dict[tuple[str, str], float] = {}
        self._limited = self.tree.bounded or sharing.user_jobs is not None or sharing.user_gpus is not None

    def started(self, job: Job, ranks: int) -> None:
        """Count a job that the pass places, with its number of ranks."""
        self._add(job, ranks).gangs += 1

    def more(self, job: Job, ranks: int) -> None:
        """Count the ranks that an elastic job gets, or may grow by, beyond those that are counted."""
        if ranks:
            self._add(job, ranks)

    def hindrance(self, job: Job) -> QueueAtMaximum | UserAtLimit | None:
        """Return the quota or limit that keeps the job from starting now, whatever is free; None without one."""
        if not self._limited:
            return None
        gpus = rank_size(job)[1] * job.size.least
        for queue in self.tree.path(self.tree.queue_of(job)):
            held = self.held_gpus(queue.name)
            if gpus > 0 and queue.maximum is not None and held + gpus > queue.maximum + EPSILON:
                return QueueAtMaximum(queue=queue.name, maximum=queue.maximum, used=held, gpus=gpus)
        user, sharing = job.submission.user, self.sharing
        jobs, used = self._held(lambda account: account.user == user)
        if sharing.user_jobs is not None and jobs >= sharing.user_jobs:
            return UserAtLimit(user=user, limit=sharing.user_jobs, used=jobs, gpus=0.0)
        if gpus > 0 and sharing.user_gpus is not None and used.gpus + gpus > sharing.user_gpus + EPSILON:
            return UserAtLimit(user=user, limit=sharing.user_gpus, used=used.gpus, gpus=gpus)
        return None

    def most_ranks(self, job: Job) -> int:
        """Return the most ranks that quotas and limits allow an elastic job that has nodes, or that was ``started``."""
        gpus, user = rank_size(job)[1], job.submission.user
        if not self._limited or gpus <= 0:
            return job.size.most
        path = self.tree.path(self.tree.queue_of(job))
        room = [queue.maximum - self.held_gpus(queue.name) for queue in path if queue.maximum is not None]
        if self.sharing.user_gpus is not None:
            room.append(self.sharing.user_gpus - self._held(lambda account: account.user == user)[1].gpus)
        has = len(job.nodes) or job.size.least
        return min([job.size.most, *(has + max(0, floor(left / gpus + EPSILON)) for left in room)])

    def held_gpus(self, queue: str) -> float:
        """Return the GPUs that jobs of a queue hold, those of the queues below it included."""
        return self._held(self._inside(queue))[1].gpus

    def user_held_gpus(self, queue: str, user: str) -> float:
        """Return the GPUs that jobs of a user in a queue hold."""
        return self._held(self._of_user(queue, user))[1].gpus

    def holding_queues(self) -> set[str]:
        """Return the queues, as job.yaml files name them, with jobs that hold GPUs."""
        held = (*self._accounts.held.items(), *self._started.items())
        return {account.queue for account, one in held if one.amounts.gpus > 0}

    def path_key(self, queue: str) -> PathKey:
        """Return a queue's sort key: at each level, those under their guarantee first, then by share over weight."""
        return tuple(
            (
                self.held_gpus(q.name) >= self.tree.guaranteed.get(q.name, 0) - EPSILON,
                self.queue_share(q.name) / q.weight,
            )
            for q in self.tree.path(queue)
        )

    def queue_share(self, queue: str) -> float:
        """Return the dominant share of a queue and those below it, now and over time."""
        return self._share((queue, ""), self._inside(queue))

    def user_share(self, queue: str, user: str) -> float:
        """Return the dominant share of a user in a queue, now and over time."""
        return self._share((queue, f"user {user}"), self._of_user(queue, user))

    def _add(self, job: Job, ranks: int) -> Held:
        self.version += 1
        self._known.clear()
        held = self._started.setdefault(account_of(job), Held())
        held.amounts = held.amounts.plus(amounts_of(job, ranks))
        return held

    def _inside(self, queue: str) -> Callable[[Account], bool]:
        return lambda account: any(one.name == queue for one in self.tree.path(account.queue))

    def _of_user(self, queue: str, user: str) -> Callable[[Account], bool]:
        return lambda account: account.user == user and (not self.tree.configured or account.queue == queue)

    def _held(self, counts: Callable[[Account], bool]) -> tuple[int, Amounts]:
        """Return how many gangs the accounts that count have, and what these hold."""
        gangs, amounts = 0, Amounts()
        for account, held in (*self._accounts.held.items(), *self._started.items()):
            if counts(account):
                gangs += held.gangs
                amounts = amounts.plus(held.amounts)
        return gangs, amounts

    def _share(self, key: tuple[str, str], counts: Callable[[Account], bool]) -> float:
        if key not in self._known:
            half_life = self.sharing.half_life
            weight = 2.0 ** ((self._accounts.since - self._now) / half_life)
            sum_ = Amounts()
            for account, held in self._accounts.held.items():
                if counts(account):
                    sum_ = sum_.plus(held.amounts, 2.0).plus(held.begun, -weight)
            for account, held in self._started.items():
                if counts(account):
                    sum_ = sum_.plus(held.amounts)
            for account, used in self._past.used.items():
                if counts(account):
                    sum_ = sum_.plus(used.by(self._now, half_life), log(2) / half_life)
            self._known[key] = round(sum_.dominant(self.capacity), _DIGITS)
        return self._known[key]


def fair_shares(shares: Shares, waiting: Collection[str]) -> dict[str, float]:
    """Return the GPUs that are each queue's fair share now.

    Each level divides what its parent has: guarantees first, then the rest by weight. No queue gets more than its
    maximum, or more than it can use: what it holds, without a bound if its jobs wait (``waiting``: queues by name).
    """
    tree = shares.tree
    hungry = {queue.name for name in waiting for queue in tree.path(name)}
    uppermost = {queue.name: queue for queue in tree.below("")}
    if tree.configured:  # and those that are not configured but have jobs
        firsts = [tree.path(name)[0] for name in {*waiting, *shares.holding_queues()}]
        uppermost |= {queue.name: queue for queue in firsts}
    fair: dict[str, float] = {}
    level = [(shares.capacity.gpus, list(uppermost.values()))]
    while level:
        whole, queues = level.pop()
        fair |= _divide(whole, queues, shares, hungry)
        level += [(fair[queue.name], below) for queue in queues if (below := tree.below(queue.name))]
    return fair


def _divide(whole: float, queues: Sequence[QueueSpec], shares: Shares, hungry: Collection[str]) -> dict[str, float]:
    most = {
        queue.name: min(
            inf if queue.name in hungry else shares.held_gpus(queue.name),
            inf if queue.maximum is None else queue.maximum,
        )
        for queue in queues
    }
    fair = {q.name: min(most[q.name], float(shares.tree.guaranteed.get(q.name, 0))) for q in queues}
    promised = sum(fair.values())
    if promised > whole:  # more was promised than there is
        return {name: amount * whole / promised for name, amount in fair.items()}
    left = whole - promised
    open_ = [queue for queue in queues if fair[queue.name] < most[queue.name] - EPSILON]
    while left > EPSILON and open_:
        weights = sum(queue.weight for queue in open_)
        step = min(left / weights, *((most[q.name] - fair[q.name]) / q.weight for q in open_))
        for queue in open_:
            fair[queue.name] += step * queue.weight
        left -= step * weights
        open_ = [queue for queue in open_ if fair[queue.name] < most[queue.name] - EPSILON]
    return fair
