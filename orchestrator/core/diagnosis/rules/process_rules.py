"""Rules about the processes of a job's ranks: their waits where the script reports none, and memory that runs out. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from orchestrator.core.diagnosis import definitions as d
from orchestrator.core.diagnosis.figures.estimate import above
from orchestrator.core.diagnosis.rules.suspicion import Suspicion
from orchestrator.core.facts import findings as f

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.core.diagnosis.figures.growth import Growth
    from orchestrator.core.diagnosis.figures.process_window import ProcessFigures
    from orchestrator.core.diagnosis.figures.windows import JobFigures


def process_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the processes' figures."""
    yield from _awaited(job)
    yield from _starved(job)
    yield from _growing(job)


def _awaited(job: JobFigures) -> Iterator[Suspicion]:
    """Find a rank that works more than the others, which are in its process group and stand in locks meanwhile."""
    ranks = job.processes
    reported = job.gpus or any(rank.own is not None for rank in job.ranks)
    if reported or len(ranks) < 2 or len(ranks) < job.newest.num_ranks or not all(one.newest.grouped for one in ranks):
        return
    busy = [one.busy for one in ranks if one.busy is not None]
    locked = [one.locked for one in ranks if one.locked is not None]
    if len(busy) < len(ranks) or len(locked) < len(ranks):
        return
    top = max(range(len(ranks)), key=lambda place: busy[place].value)
    more = above(busy[top], [one for place, one in enumerate(busy) if place != top])
    others = median(share for place, share in enumerate(locked) if place != top)
    if more.usual <= 0.0 or others - locked[top] < d.LOCKED_MORE:
        return
    opens = d.DEFINITIONS[f.RankAwaited].opens_at - 1.0
    finding = f.RankAwaited(
        rank=ranks[top].newest.rank, busy=more.value, usual_busy=more.usual, confidence=f.Confidence.POSSIBLE
    )
    figure = min(more.value / more.usual, 1.0 + opens * more.deviations / d.CERTAIN_DEVIATIONS)
    yield Suspicion(finding=finding, figure=figure)


def _starved(job: JobFigures) -> Iterator[Suspicion]:
    """Find training threads that wait for something outside while steps are made, where the script reports no waits."""
    if not job.reports or any(rank.data_seconds is not None for rank in job.ranks):
        return
    closes = d.DEFINITIONS[f.InputStarved].closes_at
    shares = {
        one.newest.rank: one.asleep
        for one in job.processes
        if one.asleep is not None and one.asleep >= closes and one.busy is not None and one.busy.value >= d.LEAST_BUSY
    }
    if len(shares) > 1 and 2 * len(shares) > job.newest.num_ranks:
        yield _starvation(None, median(shares.values()))
        return
    for rank, share in shares.items():
        yield _starvation(rank, share)


def _starvation(rank: int | None, share: float) -> Suspicion:
    finding = f.InputStarved(rank=rank, share=share, reported=False, confidence=f.Confidence.POSSIBLE)
    return Suspicion(finding=finding, figure=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    rank: int
    growth: Growth
    limit: float
    seconds_left: float


def _growing(job: JobFigures) -> Iterator[Suspicion]:
    paces: dict[str, float] = defaultdict(float)
    for rank in job.processes:
        growth = rank.fast_growth or rank.growth
        paces[job.node_of(rank.newest.rank)] += max(0.0, growth.per_second) if growth is not None else 0.0
    found = [_filling(job, rank, paces[job.node_of(rank.newest.rank)]) for rank in job.processes]
    filling = [one for one in found if one is not None]
    if len(filling) > 1 and 2 * len(filling) > job.newest.num_ranks:
        yield _growth(min(filling, key=lambda one: one.seconds_left), every=True)
        return
    for one in filling:
        yield _growth(one, every=False)


def _filling(job: JobFigures, one: ProcessFigures, node_pace: float) -> _Filling | None:
    """Whether a rank's memory fills, by its own limit or by what its node has left for all growing ranks."""
    for growth, horizon, used in (
        (one.fast_growth, d.FAST_HORIZON_SECONDS, d.FAST_USED),
        (one.growth, d.GROWTH_HORIZON_SECONDS, 0.0),
    ):
        if growth is None or growth.per_second <= 0.0:
            continue
        seconds, limit = _end(job.newest.memory_bytes, one.newest.available_bytes, growth, node_pace)
        if seconds <= horizon and growth.used >= used * limit:
            return _Filling(rank=one.newest.rank, growth=growth, limit=limit, seconds_left=seconds)
    return None


def _end(limit: int | None, available: int | None, growth: Growth, node_pace: float) -> tuple[float, float]:
    """Return when the memory is used up, in seconds, and how much that is."""
    ends = []
    if limit is not None:
        ends.append((max(0.0, limit - growth.used) / growth.per_second, float(limit)))
    if available is not None:
        ends.append((available / max(growth.per_second, node_pace), float(growth.used + available)))
    return min(ends, default=(math.inf, 0.0))


def _growth(one: _Filling, *, every: bool) -> Suspicion:
    finding = f.HostMemoryGrowing(
        rank=None if every else one.rank,
        used_bytes=one.growth.used,
        limit_bytes=one.limit,
        bytes_per_second=one.growth.per_second,
        seconds_left=one.seconds_left,
    )
    return Suspicion(finding=finding, figure=1.0)
