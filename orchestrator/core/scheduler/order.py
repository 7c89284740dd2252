"""The order in which waiting jobs are offered to the nodes. Pure.

Jobs of one queue, user and priority are a *lane*. Lanes are ordered by:

1. whether they are *overdue*: the longest waiting job has waited for ``ageing`` seconds in which no job of the lane
   started; the lane that has been overdue for the longest comes first;
2. queues, level by level: those under their guarantee, then those with the smallest share by weight (``shares.py``);
3. inside a queue the higher priority, then the user with the smallest share;
4. if all of this is equal, and within a lane: jobs that have waited for ``ageing`` seconds, the longest wait first;
   then the jobs with the shortest expected time (``service/levels.py``), and those of one level by arrival.

A job's wait begins at its submission, or at its last preemption. A placed job counts in the shares at once, and the
order goes on with the new shares. With one user and no queues the shares are equal, so priority, expected time and
arrival decide. Back-off never changes a place.

**No job starves.** Let L lanes have waiting jobs, and let every gang end, or be stopped, within D seconds of its start.
Take a job that fits on the empty nodes, that no quota or limit holds back, and before which k jobs of its lane began to
wait. It starts within A + (k + 1)(A + 2 L D) seconds, where A is ``ageing``. After A seconds it precedes all jobs of
its lane but those k, because jobs that were submitted or preempted later have waited for less. From then on the lane is
overdue after A seconds without a start. At most L - 1 lanes have been overdue for longer and go first, and each start
ends the wait of its own lane; so the job is the first of all after L - 1 starts of overdue lanes. A job of an overdue
lane that has waited for A seconds and does not fit claims what becomes free (rounds/head.py). The only jobs behind it
that use this are those that end before it could start, by the expected ends of running jobs (backfill.py). If these end
earlier, it waits for such a job, at most for D. So each of these starts, and its own, takes at most 2 D. The same then
holds for the next job of its lane. A job for which no single end makes room is passed at first by the jobs of its lane
that fit, and each of their starts postpones the time at which the lane is overdue. They no longer pass it once it
claims what is free, after three times ``ageing`` at the latest, or after ten times with time sharing; for such a job
that time replaces the first A of the bound.
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
    """Reason why one job comes before another."""

    RESIZED = "resized"
    OVERDUE = "overdue"
    QUEUE = "queue"
    PRIORITY = "priority"
    USER = "user"
    AGED = "aged"
    WORK = "work"
    ARRIVAL = "arrival"


class WaitingOrder:
    """Iterates over waiting jobs. ``shares`` change during the iteration, and the order goes on with the new ones.

    ``others`` are waiting jobs besides those of ``lines``, which have learned from ``run_times``. ``started`` has the
    time at which a job of each lane last started. ``resized`` are the jobs that were stopped only to be resized or
    moved. They are in no lane and come first, so that they do not lose what they had; those that move precede the
    others.
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
        """Return the reason why ``first`` comes before ``second``, both of which wait."""
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
        """Whether any of the waiting jobs may have a ``max_duration``."""
        entries = (entry for waiting in self._lanes.values() for entry in waiting.entries)
        return any(entry.kind is None or entry.kind.limit is not None for entry in entries)

    def queues(self) -> set[str]:
        """Return the queues in which jobs wait, as their job.yaml names them."""
        return {lane.queue for lane in self._lanes} | {job.spec.queue for job in self._resized}

    def next_overdue(self) -> float | None:
        """Return when the next job will have waited for too long; None if that would change nothing."""
        due = [since for since, _ in self._heads()] if len(self._lanes) > 1 else []
        mixed = (waiting.longest(self._now) for waiting in self._lanes.values() if len(waiting.entries) > 1)
        due += [waiting_since(job) for job in mixed if job is not None]
        ageing = self._shares.sharing.ageing
        return min((since + ageing for since in due if since + ageing > self._now), default=None)

    @property
    def _latest(self) -> float:
        """The latest time at which the wait of an aged job began."""
        return self._now - self._shares.sharing.ageing

    def _heads(self) -> list[tuple[float, Job]]:
        """Return, for each lane, the longest waiting of the jobs that may start now, with a time.

        Since that time the job has waited and no job of the lane has started.
        """
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
