"""Selects running jobs that may stop for a waiting one: lower priorities of its queue, and jobs on borrowed GPUs. Pure.

Without queues, a job gives way to every one of higher priority. With queues, priorities count only inside a queue.
Between queues GPUs are *reclaimed*: for a queue that stays within its guarantee with the job, from a queue that holds
more than its fair share, and only while it still does. If more is guaranteed than the cluster has, a guarantee counts
only up to the queue's fair share. So a reclaim never raises a queue's use above its fair share at a sibling's expense.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from orchestrator.core.cluster import EPSILON
from orchestrator.core.scheduler.placement import rank_size

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.shares import Shares
    from orchestrator.spec.queues import QueueSpec


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
    def useful(queue: QueueSpec) -> float:
        wanted = inf if queue.name in hungry else shares.held_gpus(queue.name)
        return min(wanted, inf if queue.maximum is None else queue.maximum)

    most = {queue.name: useful(queue) for queue in queues}
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


class Reclaim:
    """Selects the jobs that give way to one job. ``waiting`` are the queues of all jobs that wait."""

    def __init__(self, job: Job, shares: Shares, waiting: Iterable[str]) -> None:
        self._job = job
        self._shares = shares
        self._queue = shares.tree.queue_of(job)
        self._gpus = rank_size(job)[1] * job.size.least
        self._fair = fair_shares(shares, set(waiting)) if shares.tree.configured else {}

    def may_give_way(self, queue: str, priority: int) -> bool:
        """Whether a job of this queue, as a job.yaml names it, and priority may be among those that give way."""
        same = not self._shares.tree.configured or queue == self._queue
        return priority < self._job.priority if same else self._gpus > 0

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
            if queue == self._queue:
                found.append(other)
            elif self._reclaims(other, taken):
                found.append(other)
                for each in self._shares.tree.path(queue):
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
