"""The order in which waiting jobs are offered to the nodes. Pure.

Jobs of one queue, user and priority are a *class*. Classes are ordered by:

1. whether they are *overdue*: the longest waiting job has waited for ``ageing`` seconds in which no job of the class
   started; the class that has been overdue for the longest comes first;
2. queues, level by level: those under their guarantee, then those with the smallest share by weight (``shares.py``);
3. inside a queue the higher priority, then the user with the smallest share;
4. if all of this is equal, and within a class: jobs that have waited for ``ageing`` seconds, then the jobs with the
   shortest expected time, by its level (``durations.py``); of equals the one that has waited the longest.

A job's wait begins at its submission, or at its last preemption. A placed job counts in the shares at once, and the
order goes on with the new shares. With one user and no queues the shares are equal, so priority, expected time and
waiting time decide. Back-off never changes a place. ``docs/queues.md`` has the proof that no job starves.

Waiting jobs are kept in groups: jobs of a class that need the same resources on the same nodes and are on the same level
whatever that is. Free resources, and the rest of limits, only shrink during a decision. So once a job of a group cannot
start, none of the others can, and the decision skips them: it examines groups, not jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.scheduler.durations import Like, attained, like, waiting_since, was_preempted
from orchestrator.core.scheduler.placement import Shape, shape_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes
    from orchestrator.core.scheduler.shares import PathKey, Shares

AGED: Final = -1
"""The level of a job that has waited for ``ageing``: before all others."""
Entry = tuple[float, int, "Job"]


class QueueClass(NamedTuple):
    """Jobs that queues, shares and priorities treat alike; ``queue`` as their job.yaml names it."""

    queue: str
    user: str
    priority: int


class Group(NamedTuple):
    """Properties that the jobs of a group have in common.

    ``limit`` are the seconds of ``max_duration``; ``name`` is theirs if like jobs give a forecast, and ``ran`` the class
    of their run time. ``alone``: the id of a job that is examined on its own, because it had a back-off or failed.
    """

    queue_class: QueueClass
    shape: Shape
    least: int
    strategy: str
    limit: float | None
    name: str
    ran: float
    alone: str = ""

    def level(self, run_times: RunTimes) -> int:
        """Return the level of the group's jobs."""
        left = None if self.limit is None else self.limit - self.ran
        return run_times.level(Like(self.queue_class.user, self.name), self.ran, left)


class Rule(StrEnum):
    """Reason why one job comes before another."""

    RESIZED = "resized"
    OVERDUE = "overdue"
    QUEUE = "queue"
    PRIORITY = "priority"
    USER = "user"
    AGED = "aged"
    WORK = "work"
    ARRIVAL = "arrival"


def group_of(job: Job, likes: Container[Like]) -> Group:
    """Return the group of a waiting job; ``likes`` are the keys with enough run times for a forecast."""
    spec, limit = job.spec, job.spec.max_duration
    return Group(
        queue_class=QueueClass(spec.queue, job.submission.user, job.priority),
        shape=shape_of(job),
        least=job.size.least,
        strategy=spec.resources.placement_strategy,
        limit=None if limit is None else limit.total_seconds(),
        name=job.name if likes and like(job) in likes else "",
        ran=attained(job) if job.attempts else 0.0,
        alone=job.id if job.not_before or (job.attempts and not was_preempted(job)) else "",
    )


class WaitingJobs:
    """Waiting jobs by group; in each group the one that has waited the longest comes first."""

    def __init__(self) -> None:
        self.groups: dict[Group, list[Entry]] = {}
        self._group_of: dict[JobId, Group] = {}
        self._likes: AbstractSet[Like] = frozenset()

    def __len__(self) -> int:
        return len(self._group_of)

    def group(self, job_id: JobId) -> Group | None:
        """Return the group of a job; None if it is not among them."""
        return self._group_of.get(job_id)

    def add(self, job: Job) -> None:
        """Add a waiting job."""
        group = self._group_of[job.id] = group_of(job, self._likes)
        insort(self.groups.setdefault(group, []), (waiting_since(job), job.submission.sequence, job))

    def remove(self, job: Job) -> None:
        """Remove a job; the record is the one that was added."""
        group = self._group_of.pop(job.id)
        entries = self.groups[group]
        del entries[bisect_left(entries, (waiting_since(job), job.submission.sequence))]
        if not entries:
            del self.groups[group]

    def learn(self, run_times: RunTimes) -> None:
        """Form the groups anew if other jobs have a forecast than before."""
        likes = run_times.likes()
        if likes != self._likes:
            self._likes = likes
            jobs = [job for entries in self.groups.values() for _, _, job in entries]
            self.groups.clear()
            for job in jobs:
                self.add(job)


class WaitingOrder:
    """Iterates over waiting jobs. ``shares`` change during the iteration, and the order goes on with the new ones.

    ``started`` has the time at which a job of each class last started. ``resized`` are the jobs that were stopped only
    to be resized. They are in no class and come first, so that they do not lose what they had.
    """

    def __init__(
        self,
        groups: Mapping[Group, Sequence[Entry]],
        started: Mapping[tuple[str, str, int], float],
        shares: Shares,
        run_times: RunTimes,
        now: float,
        resized: Sequence[Job] = (),
    ) -> None:
        self._groups = groups
        self._classes = {group.queue_class for group in groups}
        self._resized = sorted(resized, key=lambda job: (-job.priority, job.submission.sequence))
        self._started = started
        self._shares = shares
        self._run_times = run_times
        self._now = now
        self._latest = now - shares.sharing.ageing
        self._passed: set[Group] = set()

    def __iter__(self) -> Iterator[Job]:
        yield from self._resized
        overdue = self._overdue()
        yield from overdue
        first = {job.id for job in overdue}
        yield from (job for job in self._by_share() if job.id not in first)

    def pass_over(self, group: Group) -> None:
        """Offer no more jobs of the group."""
        self._passed.add(group)

    def limited(self) -> bool:
        """Whether any of the waiting jobs has a ``max_duration``."""
        return any(group.limit is not None for group in self._groups)

    def queues(self) -> set[str]:
        """Return the queues in which jobs wait, as their job.yaml names them."""
        return {queue_class.queue for queue_class in self._classes} | {job.spec.queue for job in self._resized}

    def next_aged(self) -> float | None:
        """Return when the next job will have waited for ``ageing``; None if that would change nothing."""
        if len(self._groups) < 2:
            return None
        later = ((entries, bisect_right(entries, self._latest, key=itemgetter(0))) for entries in self._groups.values())
        return min((entries[n][0] + self._now - self._latest for entries, n in later if n < len(entries)), default=None)

    def rule(self, first: Job, second: Job) -> Rule:
        """Return the reason why ``first`` comes before ``second``, both of which wait."""
        if any(job.id == first.id for job in self._resized):
            return Rule.RESIZED
        if any(job.id == first.id for job in self._overdue()):
            return Rule.OVERDUE
        groups = [group_of(job, self._run_times.likes()) for job in (first, second)]
        mine, other = (self._key(group.queue_class) for group in groups)
        for rule, one, another in zip((Rule.QUEUE, Rule.PRIORITY, Rule.USER), mine, other, strict=True):
            if one != another:
                return rule
        pairs = zip(groups, (first, second), strict=True)
        levels = [self._rank(g, (waiting_since(job), job.submission.sequence, job))[0] for g, job in pairs]
        if AGED in levels:
            return Rule.AGED
        return Rule.ARRIVAL if levels[0] == levels[1] else Rule.WORK

    def _overdue(self) -> list[Job]:
        """Return the longest waiting job of each overdue class, the class that has been overdue for the longest first."""
        heads: dict[QueueClass, Entry] = {}
        for group, entries in self._groups.items() if len(self._classes) > 1 else ():
            if entries[0][2].not_before <= self._now:
                heads[group.queue_class] = min(
                    entries[0], heads.get(group.queue_class, entries[0]), key=itemgetter(0, 1)
                )
        due = [
            (max(entry[0], self._started.get(queue_class, 0.0)), entry[1], entry[2])
            for queue_class, entry in heads.items()
        ]
        return [job for since, _, job in sorted(due, key=itemgetter(0, 1)) if since <= self._latest]

    def _by_share(self) -> Iterator[Job]:
        groups = list(self._groups.items())
        places = [0] * len(groups)
        keys: dict[QueueClass, tuple[int, tuple[PathKey, int, float]]] = {}

        def key(queue_class: QueueClass) -> tuple[PathKey, int, float]:
            """Return the class's key, with the shares as they are now."""
            if queue_class not in keys or keys[queue_class][0] != self._shares.version:
                keys[queue_class] = self._shares.version, self._key(queue_class)
            return keys[queue_class][1]

        heap = [(key(group.queue_class), self._rank(group, entries[0]), n) for n, (group, entries) in enumerate(groups)]
        heapify(heap)
        while heap:
            before, rank, number = heap[0]
            group, entries = groups[number]
            if group in self._passed:
                heappop(heap)
                continue
            if (
                fresh := key(group.queue_class)
            ) != before:  # in a pass shares only grow: an old key is too small, never too large
                heapreplace(heap, (fresh, rank, number))
                continue
            yield entries[places[number]][2]
            places[number] += 1
            if places[number] < len(entries):
                heapreplace(heap, (before, self._rank(group, entries[places[number]]), number))
            else:
                heappop(heap)

    def _key(self, queue_class: QueueClass) -> tuple[PathKey, int, float]:
        if len(self._classes) == 1:
            return (), 0, 0.0
        queue = queue_class.queue if self._shares.tree.configured else ""
        return self._shares.path_key(queue), -queue_class.priority, self._shares.user_share(queue, queue_class.user)

    def _rank(self, group: Group, entry: Entry) -> tuple[int, float, int]:
        """Return the sort key of a job within its class."""
        level = AGED if entry[0] <= self._latest else group.level(self._run_times)
        return level, entry[0], entry[1]
