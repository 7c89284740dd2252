"""Rules that interpret a job's figures: each returns suspicions with the figure that the definition uses. Pure.

In this order: GPUs, each compared with the job's others; processes, where the script reports nothing; checkpoints and their storage; ranks; the
whole job.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.definitions import DEFINITIONS
from orchestrator.core.diagnosis.figures import Estimate, above, in_lockstep, typical
from orchestrator.core.diagnosis.health import GATHERING
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.faults import GpuEcc
from orchestrator.core.facts.findings import Sign
from orchestrator.core.thresholds import (
    BUSY_UTILIZATION,
    GROWTH_HORIZON_SECONDS,
    IDLE_UTILIZATION,
    LOWER_LIMIT,
    SPINNING_UTILIZATION,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from orchestrator.core.diagnosis.figures import (
        GpuFigures,
        Growth,
        JobFigures,
        LossFigures,
        ProcessFigures,
        RankFigures,
        RankStorage,
        StorageFigures,
    )
    from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen, SavesSeen, StallSeen
    from orchestrator.core.facts.findings import Finding


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Possible finding with its ``figure``, larger for worse; ``definitions.py`` defines where the finding opens."""

    finding: Finding
    figure: float


def _sure(cls: type[Finding], figure: float, **fields: Any) -> Suspicion:
    """Return a suspicion whose figures are measured directly."""
    return Suspicion(cls(**fields, confidence=f.Confidence.CERTAIN), figure)


def _of_gpu(cls: type[Finding], gpu: GpuSeen, figure: float, confidence: f.Confidence, **fields: Any) -> Suspicion:
    """Return a suspicion about a GPU."""
    subject: dict[str, Any] = {"rank": gpu.rank, "gpu_uuid": gpu.gpu_uuid, "node": gpu.node, "confidence": confidence}
    return Suspicion(cls(**subject, **fields), figure)


HARMLESS: Final = frozenset({"clock_setting", "sync_boost"})
"""Throttle reasons of clocks that a user has set, for one GPU or for a group."""
POWER_CAP: Final = "power_cap"
HEAVIER: Final = 1.15
"""A GPU that draws this much more power than its neighbours does more work: its clock is no evidence."""
WORKING: Final = frozenset({Sign.WORKS, Sign.SPINS})


def gpu_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the GPUs' figures."""
    gpus = {gpu.newest.gpu_uuid: gpu for gpu in job.gpus}  # ranks may share a GPU
    alone = list(gpus.values())
    for gpu in alone:
        yield from _reported(gpu.newest)
        others = [other for other in alone if other is not gpu]
        yield from _throttled(gpu, _alike(gpu, others))
        yield from _slow_clock(gpu, _alike(gpu, others))
        yield from _idle(gpu, others)
        yield from _growing_gpu(gpu)
        yield from _memory_errors(gpu)
        yield from _taken(gpu.newest)
    if len(alone) > 1 and len({gpu.newest.model for gpu in alone}) == 1:
        yield from _powerful(job, alone)
        yield from _uneven(job, alone)
    yield from _all_idle(job, alone)
    yield from _skewed(alone)


def _reported(gpu: GpuSeen) -> Iterator[Suspicion]:
    certain = f.Confidence.CERTAIN
    if gpu.fault is not None:
        yield _of_gpu(f.GpuFaulty, gpu, 1.0, certain, fault=gpu.fault)
    if gpu.silent or gpu.starting:
        yield _of_gpu(f.ExporterSilent, gpu, d.STARTING if gpu.starting else 1.0, certain)
    if gpu.foreign_pids:
        yield _of_gpu(f.GpuShared, gpu, 1.0, certain, pids=gpu.foreign_pids)


def _memory_errors(gpu: GpuFigures) -> Iterator[Suspicion]:
    """Return suspicions from uncorrected memory errors since the attempt began, and from corrected ones and remaps."""
    newest, errors, certain = gpu.newest, gpu.errors, f.Confidence.CERTAIN
    if errors.uncorrected and newest.fault is None:
        fault = GpuEcc(gpu_uuid=newest.gpu_uuid, errors=errors.uncorrected)
        yield _of_gpu(f.GpuFaulty, newest, 1.0, certain, fault=fault)
    if errors.corrected or errors.remapped:
        figure = max(errors.corrected / d.CORRECTED, float(errors.remapped))
        counts = {"corrected": errors.corrected, "remapped": errors.remapped}
        yield _of_gpu(f.GpuMemoryErrors, newest, figure, certain, **counts)


def _taken(gpu: GpuSeen) -> Iterator[Suspicion]:
    """Return a suspicion of unaccounted memory, where the driver reports the use of each of the jobs' processes."""
    used, own, total = gpu.memory_bytes, gpu.own_memory_bytes, gpu.memory_total_bytes
    if used is None or own is None or not total:
        return
    yield _of_gpu(
        f.GpuMemoryTaken,
        gpu,
        (used - own) / max(d.FOREIGN_BYTES, d.FOREIGN_SHARE * total),
        f.Confidence.LIKELY,
        used_bytes=used,
        own_bytes=own,
        total_bytes=total,
    )


def _alike(gpu: GpuFigures, others: Sequence[GpuFigures]) -> list[GpuFigures]:
    return [other for other in others if other.newest.model == gpu.newest.model]


def _usual(gpus: Sequence[GpuFigures], value: Callable[[GpuFigures], float | None]) -> float | None:
    known = [found for gpu in gpus if (found := value(gpu)) is not None]
    return median(known) if known else None


def _throttled(gpu: GpuFigures, alike: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    shares = {reason: share for reason, share in gpu.throttle.items() if reason not in HARMLESS}
    if POWER_CAP in shares and not _below(gpu, alike):
        del shares[POWER_CAP]  # at full load a GPU reaches its own limit, as designed
    if shares:
        yield _of_gpu(
            f.GpuThrottled,
            gpu.newest,
            max(shares.values()),
            f.Confidence.CERTAIN,
            reasons=tuple(sorted(shares, key=lambda reason: (-shares[reason], reason))),
            share=max(shares.values()),
        )


def _below(gpu: GpuFigures, alike: Sequence[GpuFigures]) -> bool:
    """Whether the GPU has a lower limit or clock than its neighbours."""
    limit, clock = gpu.newest.power_limit_watts, gpu.clock_hertz
    usual_limit = _usual(alike, lambda other: other.newest.power_limit_watts)
    usual_clock = _usual(alike, lambda other: other.clock_hertz)
    lower_limit = limit is not None and usual_limit is not None and limit < LOWER_LIMIT * usual_limit
    lower_clock = clock is not None and usual_clock is not None and clock < LOWER_LIMIT * usual_clock
    return lower_limit or (lower_clock and not _heavier(gpu, alike))


def _heavier(gpu: GpuFigures, alike: Sequence[GpuFigures]) -> bool:
    usual = _usual(alike, lambda other: other.power_watts)
    return usual is not None and gpu.power_watts is not None and gpu.power_watts > HEAVIER * usual


def _slow_clock(gpu: GpuFigures, alike: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    usual = _usual(alike, lambda other: other.clock_hertz)
    if gpu.clock_hertz is None or not usual or gpu.throttle.keys() - HARMLESS or _heavier(gpu, alike):
        return
    yield _of_gpu(
        f.GpuSlow,
        gpu.newest,
        1.0 - gpu.clock_hertz / usual,
        f.Confidence.LIKELY,
        hertz=gpu.clock_hertz,
        usual_hertz=usual,
    )


def _idle(gpu: GpuFigures, others: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    usual = _usual(others, lambda other: other.utilization)
    if gpu.utilization is None or usual is None or usual < BUSY_UTILIZATION:
        return
    yield _of_gpu(
        f.GpuIdle,
        gpu.newest,
        1.0 - gpu.utilization / usual,
        f.Confidence.CERTAIN,
        utilization=gpu.utilization,
        usual_utilization=usual,
    )


def _powerful(job: JobFigures, gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    """Find the awaited rank without ranks' own times: every GPU is busy, one draws more power, and the others spin."""
    if any(rank.own is not None for rank in job.ranks):
        return
    if any((gpu.utilization or 0.0) < SPINNING_UTILIZATION or gpu.power_watts is None for gpu in gpus):
        return
    top = max(gpus, key=lambda gpu: gpu.power_watts or 0.0)
    usual = _usual([gpu for gpu in gpus if gpu is not top], lambda gpu: gpu.power_watts)
    if not usual or top.power_watts is None:
        return
    yield _of_gpu(
        f.RankAwaited,
        top.newest,
        top.power_watts / usual,
        f.Confidence.POSSIBLE,
        watts=top.power_watts,
        usual_watts=usual,
    )


def _uneven(job: JobFigures, gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    if job.newest.load_cv is None or len(busy) < len(gpus) or fmean(busy) < BUSY_UTILIZATION:
        return
    yield Suspicion(f.LoadUneven(cv=job.newest.load_cv, confidence=f.Confidence.POSSIBLE), job.newest.load_cv)


def _all_idle(job: JobFigures, gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    if not gpus or any(gpu.utilization is None or gpu.utilization >= IDLE_UTILIZATION for gpu in gpus):
        return
    stall = job.newest.stall
    if job.reports:
        if stall is None and job.ranks and not job.newest.certain_work:  # a simulated GPU is never used
            yield _sure(f.GpusUnused, 1.0, gpus=len(gpus))
    elif stall is not None and stall.seen.sign not in WORKING:
        yield _sure(f.JobIdle, 1.0, gpus=len(gpus))


def _growing_gpu(gpu: GpuFigures) -> Iterator[Suspicion]:
    growth, total = gpu.growth, gpu.newest.memory_total_bytes
    if growth is None or not total or growth.per_second <= 0.0:
        return
    left = max(0.0, total - growth.used) / growth.per_second
    if left > GROWTH_HORIZON_SECONDS:
        return
    yield _of_gpu(
        f.GpuMemoryGrowing,
        gpu.newest,
        1.0,
        f.Confidence.LIKELY,
        used_bytes=growth.used,
        total_bytes=total,
        bytes_per_second=growth.per_second,
        seconds_left=left,
    )


def _skewed(gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    """Return one suspicion for each node: its GPUs share a clock, and the smallest offset is the most exact."""
    offsets: dict[str, float] = {}
    for gpu in gpus:
        offset, node = gpu.clock_offset_seconds, gpu.newest.node
        if offset is not None and (node not in offsets or abs(offset) < abs(offsets[node])):
            offsets[node] = offset
    for node, offset in offsets.items():
        yield _sure(f.ClockSkewed, abs(offset), node=node, seconds=offset)


def process_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the processes' figures."""
    yield from _awaited_in_locks(job)
    yield from _starved_processes(job)
    yield from _growing_hosts(job)


def _awaited_in_locks(job: JobFigures) -> Iterator[Suspicion]:
    """Find a rank for which the others, in one process group with it, wait in locks: it works more than they do, or waits for something else."""
    ranks = [_Waiting(one.newest.rank, one.busy, one.locked) for one in job.processes if one.busy and one.locked]
    if job.gpus or len(ranks) < 2 or len(ranks) < job.newest.num_ranks:
        return
    if not all(one.newest.grouped for one in job.processes):
        return
    if not any(rank.own is not None for rank in job.ranks):
        yield from _working(ranks)
    if in_lockstep(job.ranks):
        yield from _waiting(ranks)


class _Waiting(NamedTuple):
    rank: int
    busy: Estimate
    locked: Estimate


def _working(ranks: Sequence[_Waiting]) -> Iterator[Suspicion]:
    top = max(ranks, key=lambda one: one.busy.value)
    others = [one for one in ranks if one is not top]
    more = above(top.busy, [one.busy for one in others])
    if more.usual <= 0.0 or typical([one.locked for one in others]) - top.locked.value < d.LOCKED_MORE:
        return
    yield Suspicion(
        f.RankAwaited(rank=top.rank, busy=more.value, usual_busy=more.usual, confidence=f.Confidence.POSSIBLE),
        min(more.value / more.usual, _certain(more.deviations)),
    )


def _waiting(ranks: Sequence[_Waiting]) -> Iterator[Suspicion]:
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
    yield Suspicion(finding, min(1.0 + more, _certain(more / error)))


def _certain(deviations: float) -> float:
    """Return the highest figure that a difference of ``deviations`` standard errors can have."""
    return 1.0 + (DEFINITIONS[f.RankAwaited].opens_at - 1.0) * deviations / d.CERTAIN_DEVIATIONS


def _starved_processes(job: JobFigures) -> Iterator[Suspicion]:
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
    return Suspicion(f.InputStarved(rank=rank, share=share, reported=False, confidence=f.Confidence.POSSIBLE), share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    rank: int
    growth: Growth
    limit: float
    seconds_left: float


def _growing_hosts(job: JobFigures) -> Iterator[Suspicion]:
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
    return Suspicion(
        f.HostMemoryGrowing(
            rank=None if every else one.rank,
            used_bytes=one.growth.used,
            limit_bytes=one.limit,
            bytes_per_second=one.growth.per_second,
            seconds_left=one.seconds_left,
        ),
        1.0,
    )


def saves_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the figures of saves."""
    saves = job.newest.saves
    full = _full(saves, job.storage)
    if full is not None:
        yield full
    if saves.failures and saves.cause not in d.STORAGE_FULL:
        yield _sure(f.SavesFailing, float(saves.failures), failures=saves.failures, said=saves.said)
    slow_storage = _slow_storage(job)
    if slow_storage is not None:
        yield slow_storage
    stall, interval = saves.stall_seconds, saves.interval_seconds
    if stall is not None and interval and stall >= d.LEAST_STALL_SECONDS:
        yield _sure(f.SavesSlow, stall / interval, seconds=stall, interval_seconds=interval)
    if saves.behind is not None and saves.behind[0] < d.BEHIND_SHARE * saves.behind[1]:
        step, checkpoint_step = saves.behind
        yield Suspicion(f.StartedOver(step=step, checkpoint_step=checkpoint_step, confidence=f.Confidence.LIKELY), 1.0)
    yield from _rare(saves)


def _full(saves: SavesSeen, storage: StorageFigures) -> Suspicion | None:
    """Return the suspicion that a save failed for lack of space, or that the next one lacks it; None if unknown."""
    failed = bool(saves.failures) and saves.cause in d.STORAGE_FULL
    known = storage.free_bytes is not None and storage.needed_bytes > 0
    if not failed and not known:
        return None
    fill = storage.needed_bytes / max(1, storage.free_bytes or 0) if known else 0.0
    return _sure(
        f.StorageFull,
        max(1.0, fill) if failed else fill,
        free_bytes=storage.free_bytes,
        needed_bytes=storage.needed_bytes,
        said=saves.said if failed else "",
    )


def _slow_storage(job: JobFigures) -> Suspicion | None:
    """Return the suspicion of slow storage; with the slowest rank if only its write is slow and training waits less."""
    storage = job.storage
    found = [(_over_usual(one), one) for one in storage.ranks]
    waiting = storage.waiting / d.WAITING_SHARE
    figure, worst = max(found, key=lambda pair: pair[0], default=(0.0, None))
    if worst is None and not storage.waiting:
        return None
    closes = DEFINITIONS[f.StorageSlow].closes_at
    slow = sum(each >= closes for each, _ in found)
    alone = worst is not None and len(found) > 1 and slow == 1 and figure > waiting
    return _sure(
        f.StorageSlow,
        max(figure, waiting),
        rank=worst.rank if alone and worst is not None else None,
        seconds=worst.seconds if worst is not None else 0.0,
        usual_seconds=worst.usual_seconds if worst is not None else None,
        share=min(1.0, storage.waiting),
        busy=worst is not None and worst.busy,
    )


def _over_usual(one: RankStorage) -> float:
    """Return the write's time over what it may take. Writes that take long each time are paced, and harm only where training waits."""
    if one.usual_seconds is None:
        return one.seconds / d.FIRST_WRITE_SECONDS if one.busy else 0.0
    return one.seconds / max(d.LEAST_WRITE_SECONDS, d.USUAL_WRITES * one.usual_seconds)


def _rare(saves: SavesSeen) -> Iterator[Suspicion]:
    if saves.unsaved_seconds is None:
        return
    meant = d.SAVES_MISSED * (saves.interval_seconds or 0.0)
    allowed = max(d.UNSAVED_SECONDS, meant) if saves.ever or saves.interval_seconds else d.NEVER_SAVED_SECONDS
    yield _sure(
        f.SavesRare,
        saves.unsaved_seconds / allowed,
        seconds=saves.unsaved_seconds,
        interval_seconds=saves.interval_seconds,
    )


LEAST_APART_FACTOR: Final = 1.03
"""Every rank of a slow node is slower than the others' typical one by this factor."""
LEAST_SECONDS: Final = 0.0002
"""Resolution of the steps' clock."""
RESTARTS: Final = 3.0
TRAINING_LOSSES: Final = frozenset({"loss", "train_loss", "train/loss", "training_loss", "loss/train"})
"""Names of losses that change at every step; a validation loss is the same from one evaluation to the next."""


def rank_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the ranks' figures."""
    slow: dict[f.FindingKey, Suspicion] = {}
    for ranks in (job.ranks, job.long_ranks):
        for suspicion in (one for alike in _groups(job, ranks) for one in _slow_ranks(job, alike)):
            key = f.key_of(suspicion.finding)
            if key not in slow or slow[key].figure < suspicion.figure:
                slow[key] = suspicion
    yield from slow.values()
    yield from _starved_ranks(job)
    yield from _at_breakpoints(job.newest)
    yield from _still(job.newest)


def job_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the whole job's figures."""
    for loss in job.losses:
        yield from _loss(loss)
    yield from saves_suspicions(job)
    if job.late_seconds is not None:
        yield _sure(f.DaemonOverloaded, job.late_seconds, late_seconds=job.late_seconds)
    restarts = job.newest.restarts
    if restarts is not None:
        yield _sure(
            f.RestartLoop,
            restarts.count / RESTARTS,
            restarts=restarts.count,
            seconds=restarts.seconds,
            cause=restarts.cause,
            total=restarts.total,
        )


def _groups(job: JobFigures, ranks: Sequence[RankFigures]) -> list[list[RankFigures]]:
    """Group ranks by the models of their GPUs: a slower model is no fault."""
    models: dict[int, set[str]] = {}
    for gpu in job.newest.gpus:
        models.setdefault(gpu.rank, set()).add(gpu.model)
    groups: dict[tuple[str, ...], list[RankFigures]] = {}
    for rank in ranks:
        groups.setdefault(tuple(sorted(models.get(rank.rank, ()))), []).append(rank)
    return [group for group in groups.values() if len(group) > 1]


def _slow_ranks(job: JobFigures, ranks: Sequence[RankFigures]) -> Iterator[Suspicion]:
    lockstep = in_lockstep(ranks)
    nodes = list(_slow_nodes(ranks))
    yield from nodes
    slow = {suspicion.finding.node for suspicion in nodes}
    for rank in ranks:
        if rank.node in slow:
            continue  # its node is slow
        others = [other for other in ranks if other is not rank]
        found = _slower(rank.step.value, rank.own, _owns(others)) or _slower(
            rank.step.value, rank.step, [other.step for other in others]
        )
        if found is None:
            continue
        gpus = [gpu for gpu in job.newest.gpus if gpu.rank == rank.rank]
        yield Suspicion(
            f.RankSlow(
                rank=rank.rank,
                gpu_uuid=gpus[0].gpu_uuid if len(gpus) == 1 else "",
                node=gpus[0].node if gpus else "",
                factor=found.factor,
                seconds=found.seconds,
                usual_seconds=found.usual_seconds,
                awaited=lockstep,
            ),
            found.figure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slower:
    """Excess time of a rank or a node. ``figure`` is the factor, or less where chance may explain it."""

    seconds: float
    usual_seconds: float
    figure: float

    @property
    def factor(self) -> float:
        return self.seconds / self.usual_seconds


def _owns(ranks: Sequence[RankFigures]) -> list[Estimate]:
    return [rank.own for rank in ranks if rank.own is not None]


def _slower(step: float, own: Estimate | None, others: Sequence[Estimate]) -> _Slower | None:
    """Return how much longer than the others a rank takes; None where that is too little of a step to matter."""
    if own is None or not others:
        return None
    usual = typical(others)
    if usual <= 0.0 or own.value - usual < max(LEAST_SECONDS, d.LEAST_STEP_SHARE * step):
        return None
    more = above(own, others)
    opens = DEFINITIONS[f.RankSlow].opens_at - 1.0
    certain = 1.0 + opens * more.deviations / d.CERTAIN_DEVIATIONS
    return _Slower(seconds=more.value, usual_seconds=more.usual, figure=min(more.value / more.usual, certain))


def _slow_nodes(ranks: Sequence[RankFigures]) -> Iterator[Suspicion]:
    """Return the slowest node if all its ranks, at least two, are slower than the other nodes' typical rank."""
    known = {rank.rank: rank.own or rank.step for rank in ranks}
    nodes: dict[str, list[Estimate]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(known[rank.rank])
    if "" in nodes or len(nodes) < 2:
        return
    slowest = max(nodes, key=lambda node: median(one.value for one in nodes[node]))
    own, others = nodes[slowest], [each for node, those in nodes.items() if node != slowest for each in those]
    middle = Estimate(value=median(one.value for one in own), error=median(one.error for one in own))
    least = LEAST_APART_FACTOR * median(one.value for one in others)
    if len(own) < 2 or min(one.value for one in own) < least or max(one.value for one in others) > middle.value:
        return
    found = _slower(max(rank.step.value for rank in ranks), middle, others)
    if found is not None and found.figure >= DEFINITIONS[f.NodeSlow].closes_at:
        yield Suspicion(f.NodeSlow(node=slowest, factor=found.factor, ranks=len(own)), found.figure)


def _starved_ranks(job: JobFigures) -> Iterator[Suspicion]:
    shares = {
        rank.rank: rank.data_seconds / max(rank.step.value, rank.data_seconds)
        for rank in job.ranks
        if rank.data_seconds
    }
    definition = DEFINITIONS[f.InputStarved]
    starved = {rank: share for rank, share in shares.items() if share >= definition.closes_at}
    together = len(starved) > 1 and 2 * len(starved) > len(job.ranks)
    if together:
        share = median(starved.values())
        yield _sure(f.InputStarved, share, share=share)
        return
    for rank, share in starved.items():
        yield _sure(f.InputStarved, share, rank=rank, share=share)


def _at_breakpoints(job: JobSeen) -> Iterator[Suspicion]:
    for terminal in job.terminals:
        if terminal.stopped_at is not None:
            yield _sure(f.RankAtBreakpoint, 1.0, rank=terminal.rank)


def _still(job: JobSeen) -> Iterator[Suspicion]:
    stall = job.stall
    if stall is None:
        return
    if stall.seen.sign is Sign.STOPPED:
        yield _sure(f.RankStopped, 1.0, rank=stall.seen.rank, seen=stall.seen, late=stall.late)
        return
    if stall.seen.sign in GATHERING:
        yield _gathering(stall)
        return
    if not stall.late.by_steps:
        return
    allowed = max(d.STILL_SECONDS, d.STILL_STEPS * stall.longest_step, d.STILL_PAUSES * stall.longest_pause) * (
        d.WORKING_FACTOR if stall.seen.sign in WORKING else 1.0
    )
    yield _sure(
        f.NoStep,
        1.0 if stall.proven else stall.late.still_seconds / allowed,
        rank=stall.seen.rank,
        seen=stall.seen,
        late=stall.late,
    )


def _gathering(stall: StallSeen) -> Suspicion:
    wrong = stall.seen.sign is Sign.WORLD_SIZE
    cls = f.WrongWorldSize if wrong else f.RendezvousIncomplete
    allowed = d.WORLD_SIZE_SECONDS if wrong else d.RENDEZVOUS_SECONDS
    figure = stall.late.still_seconds / allowed
    return _sure(cls, figure, rank=stall.seen.rank, seen=stall.seen, late=stall.late)


def _loss(loss: LossFigures) -> Iterator[Suspicion]:
    if not math.isfinite(loss.value):
        value = "NaN" if math.isnan(loss.value) else "infinite"
        yield _sure(f.LossNotFinite, 1.0, metric=loss.metric, value=value)
        return
    if loss.metric.lower() not in TRAINING_LOSSES:
        return
    if loss.jump is not None:
        yield Suspicion(f.LossJumped(metric=loss.metric, value=loss.now, usual=loss.usual), loss.jump)
    if loss.usual_steps is not None:
        figure = loss.steps / max(d.FLAT_STEPS, d.FLAT_FACTOR * loss.usual_steps)
    elif not loss.changed:
        figure = min(loss.steps / d.NEVER_CHANGED_STEPS, loss.seconds / d.NEVER_CHANGED_SECONDS)
    else:
        return
    yield Suspicion(f.LossFlat(metric=loss.metric, value=loss.value, steps=loss.steps), figure)
