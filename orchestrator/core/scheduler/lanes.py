"""Groups waiting jobs, so that a decision examines each group and not each job. Pure.

Jobs of one queue, user and priority are a lane. In a lane, jobs are ordered by level (service/levels.py), and those of
one level by arrival; jobs that have waited for ``ageing`` come before all of these, the longest wait first. Jobs of a
lane that need the same resources on the same nodes are of one *kind*. Free resources, and the rest of limits, only
shrink during a decision; so once a job of a lane and kind cannot start for a lasting reason, none of its equals can,
and the decision skips all of them.

A lane keeps its jobs in groups of one kind and one level, so that a decision looks at the first job of each. A group's
level may change as like jobs end, but its jobs stay together, because the level follows from what they have in common.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from heapq import heapify, heappop, heapreplace, merge
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.scheduler.durations import KnownLikes, Like
from orchestrator.core.scheduler.placement import Shape, shape_of
from orchestrator.core.scheduler.service.levels import AGED, Work, level_of, waiting_since, was_preempted, work_of
from orchestrator.core.spec_memo import SpecMemo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.durations import RunTimes

arrival = attrgetter("submission.sequence")
_kinds: SpecMemo[Kind] = SpecMemo()


class Lane(NamedTuple):
    """Jobs that queues, shares and priorities treat alike; ``queue`` as their job.yaml names it."""

    queue: str
    user: str
    priority: int


class Kind(NamedTuple):
    """Properties that decide whether a job's gang fits.

    ``limit``, the seconds of ``max_duration``, decides whether it may be backfilled.
    """

    shape: Shape
    least: int
    strategy: str
    limit: float | None


def lane_of(job: Job) -> Lane:
    """Return the lane of a job."""
    return Lane(job.spec.queue, job.submission.user, job.priority)


def kind_of(job: Job) -> Kind:
    """Return the kind of the job's gang."""
    spec = job.spec
    fixed = job.submission.resume_from is None and isinstance(spec.resources.num_workers, int)
    return _kinds.of(spec, _kind_of, job) if fixed else _kind_of(job)


def _kind_of(job: Job) -> Kind:
    limit = job.spec.max_duration
    seconds = None if limit is None else limit.total_seconds()
    return Kind(shape_of(job), job.size.least, job.spec.resources.placement_strategy, seconds)


class Group(NamedTuple):
    """Properties that the jobs of a group have in common.

    Jobs without a ``kind`` have, or had, a back-off, and are examined one by one.
    """

    kind: Kind | None
    work: Work


class Line:
    """Waiting jobs of one lane, by group and in order of arrival.

    ``returned`` are those that were preempted, in order of preemption.
    """

    __slots__ = ("groups", "returned")

    def __init__(self) -> None:
        self.groups: dict[Group, list[Job]] = {}
        self.returned: list[tuple[float, int, Job]] = []

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def __iter__(self) -> Iterator[Job]:
        return merge(*self.groups.values(), key=arrival)

    def add(self, job: Job, group: Group) -> None:
        """Add a waiting job."""
        jobs = self.groups.setdefault(group, [])
        if jobs and arrival(jobs[-1]) > arrival(job):
            insort(jobs, job, key=arrival)
        else:
            jobs.append(job)
        if was_preempted(job):
            insort(self.returned, (waiting_since(job), arrival(job), job))

    def remove(self, job: Job, group: Group) -> None:
        """Remove a job; the record is the one that was added."""
        jobs = self.groups[group]
        del jobs[0 if jobs[0] is job else bisect_left(jobs, arrival(job), key=arrival)]
        if not jobs:
            del self.groups[group]
        if was_preempted(job):
            del self.returned[bisect_left(self.returned, (waiting_since(job), arrival(job)))]

    def of_kind(self, kind: Kind) -> Iterator[Job]:
        """Return the jobs of a kind."""
        for group, jobs in self.groups.items():
            if group.kind == kind:
                yield from jobs

    def regroup(self, name: str, known: AbstractSet[Like]) -> None:
        """Regroup the jobs of a name for which like jobs have given, or no longer give, a forecast."""
        for group, jobs in list(self.groups.items()):
            moved = [job for job in jobs if job.name == name] if group.work.name in ("", name) else []
            if moved:
                ids = {job.id for job in moved}
                self.groups[group] = [job for job in jobs if job.id not in ids]
                if not self.groups[group]:
                    del self.groups[group]
                for job in moved:
                    insort(self.groups.setdefault(group_of(job, known), []), job, key=arrival)


def group_of(job: Job, known: AbstractSet[Like]) -> Group:
    """Return the group of a job; ``known`` are the keys with enough run times for a forecast."""
    return Group(None if job.not_before else kind_of(job), work_of(job, known))


class Lines:
    """Waiting jobs of all lanes, in one ``Line`` for each lane."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.by_lane: dict[Lane, Line] = {}
        self.count = 0
        self._names: Counter[Like] = Counter()
        self._known: set[Like] = set()
        self._learned: tuple[AbstractSet[Like], int | None] = self._known, None
        for job in jobs:
            self.add(job)

    def add(self, job: Job) -> None:
        """Add a waiting job."""
        lane = lane_of(job)
        line = self.by_lane.get(lane)
        if line is None:
            line = self.by_lane[lane] = Line()
        line.add(job, group_of(job, self._known))
        self._names[Like(job.submission.user, job.name)] += 1
        self.count += 1

    def remove(self, job: Job) -> None:
        """Remove a job; the record is the one that was added."""
        lane = lane_of(job)
        line = self.by_lane[lane]
        line.remove(job, group_of(job, self._known))
        self.count -= 1
        who = Like(job.submission.user, job.name)
        self._names[who] -= 1
        if not self._names[who]:
            del self._names[who]
        if not line.groups:
            del self.by_lane[lane]

    def learn(self, run_times: RunTimes) -> None:
        """Regroup the jobs for which like jobs have given a forecast since the last call, or no longer give one."""
        likes = run_times.likes()
        version = likes.version if isinstance(likes, KnownLikes) else None
        if version is not None and self._learned[0] is likes and self._learned[1] == version:
            return
        self._learned = likes, version
        if likes == self._known:
            return
        changed = likes ^ self._known
        self._known = set(likes)
        for user, name in (who for who in changed if who in self._names):
            for lane, line in self.by_lane.items():
                if lane.user == user:
                    line.regroup(name, self._known)

    def delayed(self) -> Iterator[Job]:
        """Return the jobs that have, or had, a back-off."""
        for line in self.by_lane.values():
            for group, jobs in line.groups.items():
                if group.kind is None:
                    yield from jobs


class Entry(NamedTuple):
    """Jobs of a lane, in order: of one kind and skipped together, or, without a ``kind``, examined one by one."""

    kind: Kind | None
    level: int
    jobs: Sequence[Job]


class Waiting(NamedTuple):
    """Jobs of a lane: entries, each in order of arrival, and the preempted jobs in order of preemption."""

    entries: list[Entry]
    returned: Sequence[tuple[float, int, Job]]

    def aged(self, latest: float) -> list[Job]:
        """Return the preempted jobs that have waited since ``latest`` or longer, the longest first."""
        return [job for _, _, job in self.returned[: bisect_right(self.returned, latest, key=itemgetter(0))]]

    def longest(self, now: float) -> Job | None:
        """Return the job that has waited for the longest of those that may start; None without any."""
        firsts = [_ready(entry.jobs, now) for entry in self.entries]
        firsts.append(_ready((job for _, _, job in self.returned), now))
        waits = ((waiting_since(job), arrival(job), job) for job in firsts if job is not None)
        return min(waits, key=itemgetter(0, 1), default=(0, 0, None))[2]


def _ready(jobs: Iterable[Job], now: float) -> Job | None:
    return next((job for job in jobs if job.not_before <= now), None)


def waiting_of(lines: Mapping[Lane, Line], others: Iterable[Job], run_times: RunTimes) -> dict[Lane, Waiting]:
    """Return the jobs of each lane; ``others`` are jobs besides those of the lines."""
    found: dict[Lane, Waiting] = {}
    for lane, line in lines.items():
        entries = [Entry(g.kind, level_of(g.work, lane.user, run_times), jobs) for g, jobs in line.groups.items()]
        found[lane] = Waiting(entries, line.returned)
    apart: dict[Lane, dict[Work, list[Job]]] = {}
    for job in others:
        apart.setdefault(lane_of(job), {}).setdefault(work_of(job, run_times.likes()), []).append(job)
    for lane, works in apart.items():
        known = found.get(lane, Waiting([], []))
        more = [Entry(None, level_of(w, lane.user, run_times), sorted(jobs, key=arrival)) for w, jobs in works.items()]
        back = [
            (waiting_since(job), arrival(job), job) for jobs in works.values() for job in jobs if was_preempted(job)
        ]
        found[lane] = Waiting([*known.entries, *more], sorted([*known.returned, *back]) if back else known.returned)
    return found


Rank = tuple[int, float, int]


class Cursor:
    """Iterates over the jobs of a lane in order; jobs that have waited since ``latest`` or longer have aged."""

    __slots__ = ("_aged_ids", "_entries", "_heap", "_latest", "_places")

    def __init__(self, waiting: Waiting, latest: float) -> None:
        aged = waiting.aged(latest) if waiting.returned else []
        self._entries = [*waiting.entries, Entry(None, AGED, aged)] if aged else waiting.entries
        self._aged_ids = {job.id for job in aged}
        self._latest = latest
        self._places = [0] * len(self._entries)
        numbers = range(len(self._entries))
        self._heap = [(self._rank(number), number) for number in numbers if self._move(number, 0)]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def at(self) -> Rank:
        """Return the sort key of the next job: its level and arrival, and for an aged job the beginning of its wait."""
        return self._heap[0][0]

    @property
    def kind(self) -> Kind | None:
        """Return the kind of the next job; None for a single job."""
        return self._entries[self._heap[0][1]].kind

    @property
    def job(self) -> Job:
        """Return the next job."""
        number = self._heap[0][1]
        return self._entries[number].jobs[self._places[number]]

    def forward(self) -> None:
        """Skip the next job."""
        number = self._heap[0][1]
        if self._move(number, self._places[number] + 1):
            heapreplace(self._heap, (self._rank(number), number))
        else:
            heappop(self._heap)

    def skip(self) -> None:
        """Skip the next job and its equals."""
        heappop(self._heap)

    def _move(self, number: int, place: int) -> bool:
        """Advance to the first job from ``place`` on that is not among the aged ones; return whether there is one."""
        _, level, jobs = self._entries[number]
        if self._aged_ids and level != AGED:
            while place < len(jobs) and jobs[place].id in self._aged_ids:
                place += 1
        self._places[number] = place
        return place < len(jobs)

    def _rank(self, number: int) -> Rank:
        _, level, jobs = self._entries[number]
        job = jobs[self._places[number]]
        since = waiting_since(job) if job.attempts else job.submission.submitted_at
        if since <= self._latest and (level == AGED or not was_preempted(job)):
            return (AGED, since, arrival(job))
        return (level, 0.0, arrival(job))


__all__ = [
    "Cursor",
    "Kind",
    "Lane",
    "Line",
    "Lines",
    "Rank",
    "Shape",
    "Waiting",
    "arrival",
    "kind_of",
    "lane_of",
    "shape_of",
    "waiting_of",
]
