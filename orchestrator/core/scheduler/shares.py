"""The shares of queues and users, quotas and limits. Pure.

A share is a queue's or user's part of the cluster in its dominant resource: what it holds now, plus its mean over the
past in which older seconds count less (half of it is forgotten every half-life). So two users or queues that both wait
get even shares over time, not only at each moment, and what a job takes counts at once.

Let h be what is held, and H the half-life. The mean at t is h + 2**((s - t) / H) q, where q is kept for a fixed time s:
a gang of size r that begins at b subtracts r 2**((b - s) / H) from q, and adds r 2**((e - s) / H) to it when it ends at
e. So a change updates only the balances that it concerns, and the passing of time updates none.
"""

from __future__ import annotations

from collections import defaultdict
from math import floor, log
from typing import TYPE_CHECKING, Final

from orchestrator.core.cluster import EPSILON
from orchestrator.core.facts.reasons import QueueAtMaximum, UserAtLimit
from orchestrator.core.scheduler.placement import rank_size
from orchestrator.core.scheduler.queues import QueueTree
from orchestrator.core.scheduler.use import MOST_HALVINGS, Amounts, amounts_of, capacity_of, gang_began

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.occupancy import Accounts
    from orchestrator.core.scheduler.queues import Sharing
    from orchestrator.core.scheduler.use import PastUse

_DIGITS: Final = 9
"""Decimal places of a share: rounding errors of sums must not decide before the order of arrival does."""
PathKey = tuple[tuple[bool, float], ...]


class _Balance:
    """Held amounts, and q of the module's docstring (``mean``): GPUs, CPUs and memory of each."""

    __slots__ = ("held", "mean")

    def __init__(self) -> None:
        self.held = [0.0, 0.0, 0.0]
        self.mean = [0.0, 0.0, 0.0]

    def add(self, amounts: Amounts, weight: float) -> None:
        """Add to what is held, and subtract the same, times ``weight``, from q."""
        gpus, cpus, memory = amounts
        held, mean = self.held, self.mean
        held[0] += gpus
        held[1] += cpus
        held[2] += memory
        mean[0] -= weight * gpus
        mean[1] -= weight * cpus
        mean[2] -= weight * memory

    def used(self, amounts: Amounts, factor: float) -> None:
        """Add ``factor`` times the amounts to q alone."""
        for place, amount in enumerate(amounts):
            self.mean[place] += factor * amount

    def share(self, capacity: Amounts, fade: float) -> float:
        most = 0.0
        for held, mean, whole in zip(self.held, self.mean, capacity, strict=True):
            if whole > 0:
                most = max(most, (2.0 * held + fade * mean) / whole)
        return round(most, _DIGITS)


class Shares:
    """Balances of queues and users at ``now``. ``started`` counts what a round places, ``ended`` what was released."""

    def __init__(
        self, sharing: Sharing, nodes: Mapping[str, Node], now: float, *, capacity: Amounts | None = None
    ) -> None:
        self.sharing = sharing
        self.tree = QueueTree(sharing.queues)
        self.capacity = capacity_of(nodes) if capacity is None else capacity
        self.version = 0
        self._since = self._now = now
        self._fade = 1.0
        self._queues: defaultdict[str, _Balance] = defaultdict(_Balance)
        self._users: defaultdict[tuple[str, str], _Balance] = defaultdict(_Balance)
        self._user_jobs: defaultdict[str, int] = defaultdict(int)
        self._user_gpus: defaultdict[str, float] = defaultdict(float)
        self._limited = self.tree.bounded or sharing.user_jobs is not None or sharing.user_gpus is not None

    @classmethod
    def of(
        cls,
        sharing: Sharing,
        past: PastUse,
        holding: Collection[Job],
        nodes: Mapping[str, Node],
        now: float,
        *,
        accounts: Accounts | None = None,
        capacity: Amounts | None = None,
    ) -> Shares:
        """Return the shares from the gangs of ``holding``, the other gangs, counted by ``accounts``, and past use."""
        shares = cls(sharing, nodes, now, capacity=capacity)
        for account, used in past.used.items():
            queue = account.queue if shares.tree.configured else ""
            for balance in shares._balances(queue, account.user):
                balance.used(used.by(now, sharing.half_life), log(2) / sharing.half_life)
        for job in holding:
            began = gang_began(job)
            shares._user_jobs[job.submission.user] += 1
            shares._hold(job, len(job.nodes), now if began is None else min(began, now))
        weight = 1.0 if accounts is None else 2.0 ** ((accounts.since - now) / sharing.half_life)
        for account, use in () if accounts is None else accounts.held.items():
            shares._user_jobs[account.user] += use.gangs
            shares._user_gpus[account.user] += use.held.gpus
            for balance in shares._balances(account.queue if shares.tree.configured else "", account.user):
                balance.add(use.held, 0.0)
                balance.used(use.begun, -weight)
        return shares

    def advance(self, now: float) -> None:
        """Set the time to ``now``."""
        self._now = now
        halvings = (now - self._since) / self.sharing.half_life
        self._fade = 0.5**halvings
        if halvings > MOST_HALVINGS:  # before the numbers of q become too large
            for balance in (*self._queues.values(), *self._users.values()):
                balance.mean = [mean * self._fade for mean in balance.mean]
            self._since, self._fade = now, 1.0

    def started(self, job: Job, ranks: int) -> None:
        """Count a job that the round places, with its number of ranks."""
        self._user_jobs[job.submission.user] += 1
        self._hold(job, ranks, self._now)

    def ended(self, job: Job, ranks: int) -> None:
        """Subtract the gang that a job has released, with its number of ranks."""
        self._user_jobs[job.submission.user] -= 1
        self._hold(job, -ranks, self._now)

    def more(self, job: Job, ranks: int) -> None:
        """Count the ranks that an elastic job gets, or may grow by, beyond those that are counted."""
        if ranks:
            self._hold(job, ranks, self._now)

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
        if sharing.user_jobs is not None and self._user_jobs[user] >= sharing.user_jobs:
            return UserAtLimit(user=user, limit=sharing.user_jobs, used=self._user_jobs[user], gpus=0.0)
        used = self._user_gpus[user]
        if gpus > 0 and sharing.user_gpus is not None and used + gpus > sharing.user_gpus + EPSILON:
            return UserAtLimit(user=user, limit=sharing.user_gpus, used=used, gpus=gpus)
        return None

    def most_ranks(self, job: Job) -> int:
        """Return the most ranks that quotas and limits allow an elastic job that has nodes, or that was ``started``."""
        gpus = rank_size(job)[1]
        if not self._limited or gpus <= 0:
            return job.size.most
        room = [
            queue.maximum - self.held_gpus(queue.name)
            for queue in self.tree.path(self.tree.queue_of(job))
            if queue.maximum is not None
        ]
        if self.sharing.user_gpus is not None:
            room.append(self.sharing.user_gpus - self._user_gpus[job.submission.user])
        has = len(job.nodes) or job.size.least
        return min([job.size.most, *(has + max(0, floor(left / gpus + EPSILON)) for left in room)])

    def held_gpus(self, queue: str) -> float:
        """Return the GPUs that jobs of a queue hold, those of the queues below it included."""
        return self._queues[queue].held[0]

    def user_held_gpus(self, queue: str, user: str) -> float:
        """Return the GPUs that jobs of a user in a queue hold."""
        balance = self._users.get((queue, user))
        return 0.0 if balance is None else balance.held[0]

    def holding_queues(self) -> list[str]:
        """Return the queues with jobs that hold GPUs."""
        return [name for name, balance in self._queues.items() if balance.held[0] > 0]

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
        return self._queues[queue].share(self.capacity, self._fade)

    def user_share(self, queue: str, user: str) -> float:
        """Return the dominant share of a user in a queue, now and over time."""
        balance = self._users.get((queue, user))
        return 0.0 if balance is None else balance.share(self.capacity, self._fade)

    def _hold(self, job: Job, ranks: int, at: float) -> None:
        self.version += 1
        amounts, user = amounts_of(job, ranks), job.submission.user
        weight = 2.0 ** ((at - self._since) / self.sharing.half_life)
        for balance in self._balances(self.tree.queue_of(job), user):
            balance.add(amounts, weight)
        self._user_gpus[user] += amounts.gpus

    def _balances(self, queue: str, user: str) -> Iterator[_Balance]:
        yield self._users[queue, user]
        for each in self.tree.path(queue):
            yield self._queues[each.name]
