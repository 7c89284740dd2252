"""Groups waiting jobs, so that a decision examines each group and not each job. Pure.

Jobs of one queue, user and priority are a lane: they differ only in arrival. Within a lane, jobs of one *kind* need the
same of the same nodes. Free resources, and what limits leave, only shrink during a decision; so once a job of a lane
and kind cannot start for a lasting reason, none of its equals can, and the decision skips all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heapreplace, merge
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core.scheduler.placement import needs_home, rank_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from orchestrator.core.job.record import Job

arrival = attrgetter("submission.sequence")


class Lane(NamedTuple):
    """Jobs that differ only in arrival; ``queue`` as their job.yaml names it."""

    queue: str
    user: str
    priority: int


class Shape(NamedTuple):
    """What determines on which nodes a rank of the job fits."""

    size: tuple[float, float, int]
    gpu_model: str | None
    at_home: bool
    nodes: tuple[str, ...]


class Kind(NamedTuple):
    """What determines whether the job's gang fits; ``limit``, the seconds of ``max_duration``, whether it may be backfilled."""

    shape: Shape
    least: int
    strategy: str
    limit: float | None


def lane_of(job: Job) -> Lane:
    """Return the lane of a job."""
    return Lane(job.spec.queue, job.submission.user, job.priority)


def shape_of(job: Job) -> Shape:
    """Return the shape of the job's ranks."""
    resources = job.spec.resources
    return Shape(
        rank_size(job), resources.resources_per_worker.gpu_model, bool(needs_home(job)), tuple(resources.nodes)
    )


def kind_of(job: Job) -> Kind:
    """Return the kind of the job's gang."""
    limit = job.spec.max_duration
    seconds = None if limit is None else limit.total_seconds()
    return Kind(shape_of(job), job.size.least, job.spec.resources.placement_strategy, seconds)


class Line:
    """The waiting jobs of one lane, by kind and in order of arrival. Those with a back-off, also a past one, are separate (None)."""

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: dict[Kind | None, list[Job]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.groups.values()))

    def __iter__(self) -> Iterator[Job]:
        return merge(*self.groups.values(), key=arrival)

    def add(self, job: Job) -> None:
        """Add a waiting job."""
        insort(self.groups.setdefault(_group(job), []), job, key=arrival)

    def remove(self, job: Job) -> None:
        """Remove a job; the record is the one that was added."""
        group = _group(job)
        jobs = self.groups[group]
        del jobs[bisect_left(jobs, arrival(job), key=arrival)]
        if not jobs:
            del self.groups[group]


def _group(job: Job) -> Kind | None:
    return None if job.not_before else kind_of(job)


class Lines:
    """The lines of all lanes."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.by_lane: dict[Lane, Line] = {}
        self.count = 0
        for job in jobs:
            self.add(job)

    def add(self, job: Job) -> None:
        """Add a waiting job."""
        lane = lane_of(job)
        line = self.by_lane.get(lane)
        if line is None:
            line = self.by_lane[lane] = Line()
        line.add(job)
        self.count += 1

    def remove(self, job: Job) -> None:
        """Remove a job; the record is the one that was added."""
        lane = lane_of(job)
        line = self.by_lane[lane]
        line.remove(job)
        self.count -= 1
        if not line.groups:
            del self.by_lane[lane]

    def delayed(self) -> Iterator[Job]:
        """Return the jobs that have, or had, a back-off."""
        for line in self.by_lane.values():
            yield from line.groups.get(None, ())


Groups = list[tuple["Kind | None", "Sequence[Job]"]]


def groups_of(lines: Mapping[Lane, Line], others: Iterable[Job]) -> dict[Lane, Groups]:
    """Return the groups of each lane; ``others`` are jobs beside those of the lines."""
    found: dict[Lane, Groups] = {lane: list(line.groups.items()) for lane, line in lines.items()}
    apart: dict[Lane, list[Job]] = {}
    for job in others:
        apart.setdefault(lane_of(job), []).append(job)
    for lane, jobs in apart.items():
        found.setdefault(lane, []).append((None, sorted(jobs, key=arrival)))
    return found


class Cursor:
    """Iterates over the groups of a lane in order of arrival."""

    __slots__ = ("_groups", "_heap", "_places")

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._places = [0] * len(groups)
        self._heap: list[tuple[int, int]] = [(arrival(jobs[0]), number) for number, (_, jobs) in enumerate(groups)]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def at(self) -> int:
        """Return the arrival of the next job."""
        return self._heap[0][0]

    @property
    def kind(self) -> Kind | None:
        """Return the kind of the next job; None for a single job."""
        return self._groups[self._heap[0][1]][0]

    @property
    def job(self) -> Job:
        """Return the next job."""
        number = self._heap[0][1]
        return self._groups[number][1][self._places[number]]

    def forward(self) -> None:
        """Skip the next job."""
        number = self._heap[0][1]
        jobs = self._groups[number][1]
        self._places[number] += 1
        if self._places[number] < len(jobs):
            heapreplace(self._heap, (arrival(jobs[self._places[number]]), number))
        else:
            heappop(self._heap)

    def skip(self) -> None:
        """Skip the next job and its equals."""
        heappop(self._heap)


__all__ = [
    "Cursor",
    "Groups",
    "Kind",
    "Lane",
    "Line",
    "Lines",
    "Shape",
    "arrival",
    "groups_of",
    "kind_of",
    "lane_of",
    "shape_of",
]
