"""The order in which waiting jobs are offered to the nodes. Pure.

Jobs of one queue, user and priority are a *lane*: within it, the first to arrive is the first to go. Between lanes:

1. a lane that is *overdue*: its job has waited for ``ageing`` seconds in which none of the lane started; the longest first;
2. queues, level by level: those under their guarantee, then those with the smallest share by weight (``shares.py``);
3. inside a queue the higher priority, then the user with the smallest share, then the first to arrive.

A job that is placed counts at once, so the order goes on from the shares that it leaves. With one user and no queues the
shares are equal, and what remains is priority, then arrival. Back-off never changes a place.

**Nothing starves.** Let L lanes have jobs that wait, and let every gang end, or be stopped, within D seconds of its start. Then a
job that fits on the empty nodes, that no quota or limit holds back and with k starts of its lane before it (a job that was
stopped for others starts again, and has at most four of these an hour), starts within
(k + 1)(A + 2 L D) seconds, A being ``ageing``: after A seconds without a start its lane is overdue. Lanes that have been so for
longer go first, at most L - 1 of them, and each start ends that lane's own wait; so it is the first of all after L - 1
starts of overdue lanes. The first job that does not fit claims what becomes free, and nothing behind it takes that but jobs that
end before it could start as running jobs were expected to end (backfill.py); where these end earlier, it waits for such a job, no
longer than D. So each of these starts, and its own, takes at most 2 D. The same holds then for the next of its lane.
"""

from __future__ import annotations

from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from orchestrator.core.scheduler.lanes import Cursor, arrival, groups_of, kind_of, lane_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.lanes import Kind, Lane, Line
    from orchestrator.core.scheduler.shares import PathKey, Shares

_Key = tuple["PathKey", int, float]


class Rule(StrEnum):
    """Why one job comes before another."""

    RESIZED = "resized"
    OVERDUE = "overdue"
    QUEUE = "queue"
    PRIORITY = "priority"
    USER = "user"
    ARRIVAL = "arrival"


class WaitingOrder:
    """Iterates over waiting jobs. ``shares`` change while it does: the order goes on from what they are then.

    ``others`` wait beside those of the ``lines``. ``started`` says when a lane's jobs last started. ``resized`` are the jobs that
    were stopped only to be resized. They come first, not to lose what they had, and are in no lane.
    """

    def __init__(
        self,
        lines: Mapping[Lane, Line],
        started: Mapping[tuple[str, str, int], float],
        shares: Shares,
        now: float,
        *,
        others: Iterable[Job] = (),
        resized: Sequence[Job] = (),
    ) -> None:
        self._lanes = groups_of(lines, others)
        self._resized = resized
        self._started = started
        self._shares = shares
        self._now = now
        self._passed: set[tuple[Lane, Kind]] = set()

    def __iter__(self) -> Iterator[Job]:
        yield from sorted(self._resized, key=lambda job: (-job.priority, arrival(job)))
        told = set()
        for job in self._overdue():
            told.add(job.id)
            yield job
        for job in self._by_share():
            if not told or job.id not in told:
                yield job

    def pass_over(self, job: Job) -> None:
        """Offer no more jobs of the lane and kind of this one, which was just offered."""
        self._passed.add((lane_of(job), kind_of(job)))

    def rule(self, first: Job, second: Job) -> Rule:
        """Why ``first`` comes before ``second``, both of which wait."""
        if any(job.id == first.id for job in self._resized):
            return Rule.RESIZED
        if any(job.id == first.id for job in self._overdue()):
            return Rule.OVERDUE
        mine, other = self._key(lane_of(first)), self._key(lane_of(second))
        for rule, one, another in zip((Rule.QUEUE, Rule.PRIORITY, Rule.USER), mine, other, strict=True):
            if one != another:
                return rule
        return Rule.ARRIVAL

    def limited(self) -> bool:
        """Whether jobs may be among them that have a ``max_duration``."""
        return any(kind is None or kind.limit is not None for groups in self._lanes.values() for kind, _ in groups)

    def queues(self) -> set[str]:
        """The queues in which jobs wait, as their job.yaml names them."""
        return {lane.queue for lane in self._lanes} | {job.spec.queue for job in self._resized}

    def next_overdue(self) -> float | None:
        """When the next lane becomes overdue; None where that would change nothing."""
        if len(self._lanes) < 2:
            return None
        due = [since + self._shares.sharing.ageing for since, _ in self._heads()]
        return min((at for at in due if at > self._now), default=None)

    def _heads(self) -> list[tuple[float, Job]]:
        """The first job of each lane that may start now, and since when none of its lane has."""
        heads = []
        for lane, groups in self._lanes.items():
            firsts = [next((j for j in jobs if j.not_before <= self._now), None) for _, jobs in groups]
            job = min((first for first in firsts if first is not None), key=arrival, default=None)
            if job is not None:
                heads.append((max(job.submission.submitted_at, self._started.get(lane, 0.0)), job))
        return heads

    def _overdue(self) -> list[Job]:
        latest = self._now - self._shares.sharing.ageing
        if len(self._lanes) < 2:
            return []
        found = [(since, arrival(job), job) for since, job in self._heads() if since <= latest]
        return [job for _, _, job in sorted(found, key=lambda entry: entry[:2])]

    def _by_share(self) -> Iterator[Job]:
        names = list(self._lanes)
        cursors = [Cursor(groups) for groups in self._lanes.values()]
        version = self._shares.version
        seen = [version] * len(names)
        alone = len(names) == 1
        heap = [(((), 0, 0.0) if alone else self._key(n), cursors[i].at, i) for i, n in enumerate(names)]
        heapify(heap)
        while heap:
            key, at, number = heap[0]
            version = self._shares.version
            if not alone and seen[number] != version:
                # within a round shares only grow: a key that is old is too small, never too large
                seen[number] = version
                fresh = self._key(names[number])
                if fresh != key:
                    heapreplace(heap, (fresh, at, number))
                    continue
            cursor = cursors[number]
            kind = cursor.kind
            if kind is not None and (names[number], kind) in self._passed:
                cursor.skip()
            else:
                job = cursor.job
                cursor.forward()
                yield job
            if cursor:
                heapreplace(heap, (key, cursor.at, number))
            else:
                heappop(heap)

    def _key(self, lane: Lane) -> _Key:
        queue = lane.queue if self._shares.tree.configured else ""
        return self._shares.path_key(queue), -lane.priority, self._shares.user_share(queue, lane.user)
