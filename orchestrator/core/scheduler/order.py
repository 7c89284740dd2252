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
(k + 1)(A + L D) seconds, A being ``ageing``: after A seconds without a start its lane is overdue. Lanes that have been so for
longer go first, at most L - 1 of them, and each start ends that lane's own wait; so it is the first of all after L - 1
starts of overdue lanes. The first job that does not fit claims what becomes free, and nothing behind it takes that, so each
of these starts, and its own, takes at most D. The same holds then for the next of its lane.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.shares import PathKey, Shares

_Key = tuple["PathKey", int, float]


class Lane(NamedTuple):
    """Jobs that only their arrival tells apart; ``queue`` as their job.yaml names it."""

    queue: str
    user: str
    priority: int


def lanes_of(jobs: Iterable[Job]) -> dict[Lane, list[Job]]:
    """The lanes of waiting jobs, each in order of arrival."""
    lanes: dict[Lane, list[Job]] = {}
    for job in jobs:
        submission = job.submission
        lanes.setdefault(Lane(submission.spec.queue, submission.user, job.priority), []).append(job)
    for lane in lanes.values():
        lane.sort(key=_arrival)
    return lanes


def _arrival(job: Job) -> int:
    return job.submission.sequence


class WaitingOrder:
    """Iterates over waiting jobs. ``shares`` change while it does: the order goes on from what they are then.

    ``started`` says when a lane's jobs last started. ``resized`` are the jobs that were stopped only to be resized. They come first, not to lose what they had, and are in no lane.
    """

    def __init__(
        self,
        lanes: Mapping[Lane, Sequence[Job]],
        started: Mapping[tuple[str, str, int], float],
        shares: Shares,
        now: float,
        *,
        resized: Sequence[Job] = (),
    ) -> None:
        self._lanes = lanes
        self._resized = resized
        self._started = started
        self._shares = shares
        self._now = now

    def __iter__(self) -> Iterator[Job]:
        yield from sorted(self._resized, key=lambda job: (-job.priority, _arrival(job)))
        told = set()
        for job in self._overdue():
            told.add(job.id)
            yield job
        for job in self._by_share():
            if not told or job.id not in told:
                yield job

    def __len__(self) -> int:
        return len(self._resized) + sum(map(len, self._lanes.values()))

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
        for lane, jobs in self._lanes.items():
            job = next((j for j in jobs if j.not_before <= self._now), None)
            if job is not None:
                heads.append((max(job.submission.submitted_at, self._started.get(lane, 0.0)), job))
        return heads

    def _overdue(self) -> list[Job]:
        latest = self._now - self._shares.sharing.ageing
        if len(self._lanes) < 2:
            return []
        found = [(since, _arrival(job), job) for since, job in self._heads() if since <= latest]
        return [job for _, _, job in sorted(found, key=lambda entry: entry[:2])]

    def _by_share(self) -> Iterator[Job]:
        lanes = list(self._lanes.values())
        if len(lanes) == 1:
            yield from lanes[0]
            return
        names = list(self._lanes)
        places = [0] * len(lanes)
        version = self._shares.version
        seen = [version] * len(lanes)
        heap = [(self._key(name), _arrival(lanes[number][0]), number) for number, name in enumerate(names)]
        heapify(heap)
        while heap:
            key, arrival, number = heap[0]
            version = self._shares.version
            if (
                seen[number] != version
            ):  # within a round shares only grow: a key that is old is too small, never too large
                seen[number] = version
                fresh = self._key(names[number])
                if fresh != key:
                    heapreplace(heap, (fresh, arrival, number))
                    continue
            lane = lanes[number]
            job = lane[places[number]]
            places[number] += 1
            if places[number] < len(lane):
                heapreplace(heap, (key, _arrival(lane[places[number]]), number))
            else:
                heappop(heap)
            yield job

    def _key(self, lane: Lane) -> _Key:
        queue = lane.queue if self._shares.tree.configured else ""
        return self._shares.path_key(queue), -lane.priority, self._shares.user_share(queue, lane.user)
