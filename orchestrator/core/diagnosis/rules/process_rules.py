"""Rules about the processes of a job's ranks: their waits where the script reports none, and memory that runs out. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.definitions import DEFINITIONS
from orchestrator.core.diagnosis.figures.estimate import above, typical
from orchestrator.core.diagnosis.figures.rank_window import in_lockstep
from orchestrator.core.diagnosis.rules.suspicion import Suspicion
from orchestrator.core.facts import findings as f

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.core.diagnosis.figures.estimate import Estimate
    from orchestrator.core.diagnosis.figures.growth import Growth
    from orchestrator.core.diagnosis.figures.process_window import ProcessFigures
    from orchestrator.core.diagnosis.figures.windows import JobFigures


def process_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the processes' figures."""
    yield from _awaited(job)
    yield from _starved(job)
    yield from _growing(job)


def _awaited(job: JobFigures) -> Iterator[Suspicion]:
    """Find a rank for which the others, in one process group with it, wait in locks: it works more than they do, or waits for something else."""
    ranks = [_Rank(one.newest.rank, one.busy, one.locked) for one in job.processes if one.busy and one.locked]
    if job.gpus or len(ranks) < 2 or len(ranks) < job.newest.num_ranks:
        return
    if not all(one.newest.grouped for one in job.processes):
        return
    if not any(rank.own is not None for rank in job.ranks):
        yield from _working(ranks)
    if in_lockstep(job.ranks):
        yield from _waiting(ranks)


class _Rank(NamedTuple):
    rank: int
    busy: Estimate
    locked: Estimate


def _working(ranks: Sequence[_Rank]) -> Iterator[Suspicion]:
    top = max(ranks, key=lambda one: one.busy.value)
    others = [one for one in ranks if one is not top]
    more = above(top.busy, [one.busy for one in others])
    if more.usual <= 0.0 or typical([one.locked for one in others]) - top.locked.value < d.LOCKED_MORE:
        return
    finding = f.RankAwaited(rank=top.rank, busy=more.value, usual_busy=more.usual, confidence=f.Confidence.POSSIBLE)
    yield Suspicion(finding=finding, figure=min(more.value / more.usual, _certain(more.deviations)))


def _waiting(ranks: Sequence[_Rank]) -> Iterator[Suspicion]:
    """Find a rank that waits in locks for much less of the time than every other rank: it waits for none of them."""
    least = min(ranks, key=lambda one: one.locked.value)
    others = [one.locked for one in ranks if one is not least]
    nearest = min(others, key=lambda one: one.value)
    more = nearest.value - least.locked.value
    if more <= 0.0:
        return
    finding = f.RankAwaited(
        rank=least.rank,
        locked=least.locked.value,
        usual_locked=typical(others),
        confidence=f.Confidence.POSSIBLE,
    )
    error = math.hypot(nearest.error, least.locked.error)
    yield Suspicion(finding=finding, figure=min(1.0 + more, _certain(more / error)))


def _certain(deviations: float) -> float:
    """Return the highest figure that a difference of ``deviations`` standard errors can have."""
    return 1.0 + (DEFINITIONS[f.RankAwaited].opens_at - 1.0) * deviations / d.CERTAIN_DEVIATIONS


def _starved(job: JobFigures) -> Iterator[Suspicion]:
    """Find training threads that wait for something outside while steps are made, where the script reports no waits."""
    if not job.reports or any(rank.data_seconds is not None for rank in job.ranks):
        return
    closes = DEFINITIONS[f.InputStarved].closes_at
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
    """Return the growth of a rank's memory that soon reaches its limit, or its node's for all growing ranks."""
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
    """Return the seconds until the memory is used up, and how many bytes are used then."""
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
