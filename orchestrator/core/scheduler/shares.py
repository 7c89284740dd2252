"""The shares of queues and users, fair shares, quotas and limits. Pure.

A share is a queue's or user's part of the cluster in its dominant resource: what it holds now, plus its mean over the
past in which older seconds count less (half of it is forgotten every half-life). So two users or queues that both wait
get even shares over time, not only at each moment, and what a job takes counts at once.

Let h be what is held, and H the half-life. A gang of size r that began at b adds r (1 - 2**((b - t) / H)) to the mean
at t. So the mean is h - 2**((s - t) / H) q, where q, the sum of r 2**((b - s) / H), is kept for a fixed time s: a
change updates only its account, and the passing of time updates none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf, log
from typing import TYPE_CHECKING, Final

from orchestrator.core.cluster import EPSILON
from orchestrator.core.facts.reasons import QueueAtMaximum, UserAtLimit
from orchestrator.core.scheduler.queues import QueueTree
from orchestrator.core.scheduler.resources import rank_size
from orchestrator.core.scheduler.use import MOST_HALVINGS, Account, Amounts, account_of, amounts_of, gang_began

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.core.scheduler.use import PastUse
    from orchestrator.spec.queues import QueueSpec

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
        return half_life != self.half_life or not 0.0 <= now - self.since <= MOST_HALVINGS * half_life

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
