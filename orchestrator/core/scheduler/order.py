"""The order in which waiting jobs are offered to the nodes. Pure.

Jobs of one queue, user and priority are a *lane*. Between lanes:

1. a lane that is *overdue*: its longest waiting job has waited for ``ageing`` seconds in which none of the lane started; the longest first;
2. queues, level by level: those under their guarantee, then those with the smallest share by weight (``shares.py``);
3. inside a queue the higher priority, then the user with the smallest share;
4. where all of this is equal, and within a lane: jobs that have waited for ``ageing`` seconds, the longest first; then the shortest by what is
   expected of them (``service/levels.py``), of one level the first to arrive.

A job waits since its submission, or since it was last preempted. A job that is placed counts at once, so the order goes on from the
shares that it leaves. With one user and no queues the shares are equal, and what remains is priority, what is expected, and arrival.
Back-off never changes a place.

**Nothing starves.** Let L lanes have jobs that wait, and let every gang end, or be stopped, within D seconds of its start. Then a
job that fits on the empty nodes, that no quota or limit holds back and before which k jobs of its lane have begun to wait, starts within
A + (k + 1)(A + 2 L D) seconds, A being ``ageing``. After A seconds it goes before all of its lane but those k: what was submitted, or preempted, later
has waited for less. From then on the lane is overdue after A seconds without a start. Lanes that have been so for
longer go first, at most L - 1 of them, and each start ends that lane's own wait; so it is the first of all after L - 1
starts of overdue lanes. A job of an overdue lane that has waited for A seconds and does not fit claims what becomes free (rounds/head.py), and nothing behind it takes that but jobs that
end before it could start as running jobs were expected to end (backfill.py); where these end earlier, it waits for such a job, no
longer than D. So each of these starts, and its own, takes at most 2 D. The same holds then for the next of its lane. A job that no
single end makes room for is passed at first by those of its lane that fit, and each of their starts puts off the time at which the lane is overdue. They pass it no longer
once it claims what is free, after three times ``ageing`` at the latest, with time sharing after ten times: for such a job the bound begins with that in place of A.
"""

from __future__ import annotations

from enum import StrEnum
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING

from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.lanes import Cursor, arrival, kind_of, lane_of, waiting_of
from orchestrator.core.scheduler.room.holding import moves
from orchestrator.core.scheduler.service.levels import AGED, level_of, waiting_since, work_of

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
    AGED = "aged"
    WORK = "work"
    ARRIVAL = "arrival"


class WaitingOrder:
    """Iterates over waiting jobs. ``shares`` change while it does: the order goes on from what they are then.

    ``others`` wait beside those of the ``lines``, which have learned from ``run_times``. ``started`` says when a lane's jobs last started. ``resized`` are the jobs that
    were stopped only to be resized or moved. They come first, not to lose what they had, and are in no lane; those that move before the others.
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
        run_times: RunTimes | None = None,
    ) -> None:
        self._run_times = RunTimes() if run_times is None else run_times
        self._lanes = waiting_of(lines, others, self._run_times)
        self._resized = resized
        self._started = started
        self._shares = shares
        self._now = now
        self._passed: set[tuple[Lane, Kind]] = set()
        self._first: set[str] = set()

    def __iter__(self) -> Iterator[Job]:
        yield from sorted(self._resized, key=lambda job: (not moves(job), -job.priority, arrival(job)))
        overdue = self._overdue()
        offered = self._first = {job.id for job in overdue}
        yield from overdue
        for job in self._by_share():
            if not offered or job.id not in offered:
                yield job

    def first_of_all(self, job: Job) -> bool:
        """Whether the job comes before all other lanes: its own is overdue, or the only one."""
        return len(self._lanes) < 2 or job.id in self._first

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
        levels = self._level(first), self._level(second)
        if AGED in levels:
            return Rule.AGED
        return Rule.ARRIVAL if levels[0] == levels[1] else Rule.WORK

    def _level(self, job: Job) -> int:
        if waiting_since(job) <= self._latest:
            return AGED
        return level_of(work_of(job, self._run_times.likes()), job.submission.user, self._run_times)

    def limited(self) -> bool:
        """Whether jobs may be among them that have a ``max_duration``."""
        entries = (entry for waiting in self._lanes.values() for entry in waiting.entries)
        return any(entry.kind is None or entry.kind.limit is not None for entry in entries)

    def queues(self) -> set[str]:
        """The queues in which jobs wait, as their job.yaml names them."""
        return {lane.queue for lane in self._lanes} | {job.spec.queue for job in self._resized}

    def next_overdue(self) -> float | None:
        """When the next job has waited for too long; None where that would change nothing."""
        due = [since for since, _ in self._heads()] if len(self._lanes) > 1 else []
        mixed = (waiting.longest(self._now) for waiting in self._lanes.values() if len(waiting.entries) > 1)
        due += [waiting_since(job) for job in mixed if job is not None]
        ageing = self._shares.sharing.ageing
        return min((since + ageing for since in due if since + ageing > self._now), default=None)

    @property
    def _latest(self) -> float:
        """The time since when jobs have waited too long."""
        return self._now - self._shares.sharing.ageing

    def _heads(self) -> list[tuple[float, Job]]:
        """The job of each lane that waits the longest, of those that may start now, and since when none of its lane has."""
        heads = []
        for lane, waiting in self._lanes.items():
            job = waiting.longest(self._now)
            if job is not None:
                heads.append((max(waiting_since(job), self._started.get(lane, 0.0)), job))
        return heads

    def _overdue(self) -> list[Job]:
        if len(self._lanes) < 2:
            return []
        latest = self._latest
        found = [(since, arrival(job), job) for since, job in self._heads() if since <= latest]
        return [job for _, _, job in sorted(found, key=lambda entry: entry[:2])]

    def _by_share(self) -> Iterator[Job]:
        names = list(self._lanes)
        latest = self._latest
        cursors = [Cursor(waiting, latest) for waiting in self._lanes.values()]
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
