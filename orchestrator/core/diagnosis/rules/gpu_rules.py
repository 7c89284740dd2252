"""Rules about the GPUs of one job, each compared with the job's others. Pure."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis import definitions as d
from orchestrator.core.diagnosis.definitions import (
    BUSY_UTILIZATION,
    GROWTH_HORIZON_SECONDS,
    IDLE_UTILIZATION,
    LOWER_LIMIT,
    SPINNING_UTILIZATION,
)
from orchestrator.core.diagnosis.rules.suspicion import Suspicion
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.gpus import GpuEcc
from orchestrator.core.facts.hangs import Sign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from orchestrator.core.diagnosis.figures.windows import GpuFigures, JobFigures
    from orchestrator.core.diagnosis.observation import GpuSeen

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
        yield from _slow(gpu, _alike(gpu, others))
        yield from _idle(gpu, others)
        yield from _growing(gpu)
        yield from _memory_errors(gpu)
        yield from _taken(gpu.newest)
    if len(alone) > 1 and len({gpu.newest.model for gpu in alone}) == 1:
        yield from _awaited(job, alone)
        yield from _uneven(job, alone)
    yield from _all_idle(job, alone)
    yield from _skewed(alone)


def _reported(gpu: GpuSeen) -> Iterator[Suspicion]:
    subject = {"rank": gpu.rank, "gpu_uuid": gpu.gpu_uuid, "node": gpu.node, "confidence": f.Confidence.CERTAIN}
    if gpu.fault is not None:
        yield Suspicion(finding=f.GpuFaulty(**subject, fault=gpu.fault), figure=1.0)  # type: ignore[arg-type]  # the fields of every finding
    if gpu.silent or gpu.starting:
        figure = d.STARTING if gpu.starting else 1.0
        yield Suspicion(finding=f.ExporterSilent(**subject), figure=figure)  # type: ignore[arg-type]  # the same
    if gpu.foreign_pids:
        yield Suspicion(finding=f.GpuShared(**subject, pids=gpu.foreign_pids), figure=1.0)  # type: ignore[arg-type]  # the same


def _memory_errors(gpu: GpuFigures) -> Iterator[Suspicion]:
    """Return suspicions from uncorrected memory errors since the attempt began, and from corrected ones and remaps."""
    newest, errors = gpu.newest, gpu.errors
    subject = {
        "rank": newest.rank,
        "gpu_uuid": newest.gpu_uuid,
        "node": newest.node,
        "confidence": f.Confidence.CERTAIN,
    }
    if errors.uncorrected and newest.fault is None:
        fault = GpuEcc(gpu_uuid=newest.gpu_uuid, errors=errors.uncorrected)
        yield Suspicion(finding=f.GpuFaulty(**subject, fault=fault), figure=1.0)  # type: ignore[arg-type]  # the fields of every finding
    if errors.corrected or errors.remapped:
        finding = f.GpuMemoryErrors(**subject, corrected=errors.corrected, remapped=errors.remapped)  # type: ignore[arg-type]  # the same
        yield Suspicion(finding=finding, figure=max(errors.corrected / d.CORRECTED, float(errors.remapped)))


def _taken(gpu: GpuSeen) -> Iterator[Suspicion]:
    """Return a suspicion of unaccounted memory, where the driver reports the use of each of the jobs' processes."""
    used, own, total = gpu.memory_bytes, gpu.own_memory_bytes, gpu.memory_total_bytes
    if used is None or own is None or not total:
        return
    finding = f.GpuMemoryTaken(
        rank=gpu.rank, gpu_uuid=gpu.gpu_uuid, node=gpu.node, used_bytes=used, own_bytes=own, total_bytes=total
    )
    yield Suspicion(finding=finding, figure=(used - own) / max(d.FOREIGN_BYTES, d.FOREIGN_SHARE * total))


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
        finding = f.GpuThrottled(
            rank=gpu.newest.rank,
            gpu_uuid=gpu.newest.gpu_uuid,
            node=gpu.newest.node,
            reasons=tuple(sorted(shares, key=lambda reason: (-shares[reason], reason))),
            share=max(shares.values()),
            confidence=f.Confidence.CERTAIN,
        )
        yield Suspicion(finding=finding, figure=finding.share)


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


def _slow(gpu: GpuFigures, alike: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    usual = _usual(alike, lambda other: other.clock_hertz)
    if gpu.clock_hertz is None or not usual or gpu.throttle.keys() - HARMLESS or _heavier(gpu, alike):
        return
    finding = f.GpuSlow(
        rank=gpu.newest.rank,
        gpu_uuid=gpu.newest.gpu_uuid,
        node=gpu.newest.node,
        hertz=gpu.clock_hertz,
        usual_hertz=usual,
    )
    yield Suspicion(finding=finding, figure=1.0 - gpu.clock_hertz / usual)


def _idle(gpu: GpuFigures, others: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    usual = _usual(others, lambda other: other.utilization)
    if gpu.utilization is None or usual is None or usual < BUSY_UTILIZATION:
        return
    finding = f.GpuIdle(
        rank=gpu.newest.rank,
        gpu_uuid=gpu.newest.gpu_uuid,
        node=gpu.newest.node,
        utilization=gpu.utilization,
        usual_utilization=usual,
        confidence=f.Confidence.CERTAIN,
    )
    yield Suspicion(finding=finding, figure=1.0 - gpu.utilization / usual)


def _awaited(job: JobFigures, gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    """Find the awaited rank without ranks' own times: every GPU is busy, one draws more power, and the others spin."""
    if any(rank.own is not None for rank in job.ranks):
        return
    if any((gpu.utilization or 0.0) < SPINNING_UTILIZATION or gpu.power_watts is None for gpu in gpus):
        return
    top = max(gpus, key=lambda gpu: gpu.power_watts or 0.0)
    usual = _usual([gpu for gpu in gpus if gpu is not top], lambda gpu: gpu.power_watts)
    if not usual or top.power_watts is None:
        return
    finding = f.RankAwaited(
        rank=top.newest.rank,
        gpu_uuid=top.newest.gpu_uuid,
        node=top.newest.node,
        watts=top.power_watts,
        usual_watts=usual,
        confidence=f.Confidence.POSSIBLE,
    )
    yield Suspicion(finding=finding, figure=top.power_watts / usual)


def _uneven(job: JobFigures, gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    if job.newest.load_cv is None or len(busy) < len(gpus) or fmean(busy) < BUSY_UTILIZATION:
        return
    finding = f.LoadUneven(cv=job.newest.load_cv, confidence=f.Confidence.POSSIBLE)
    yield Suspicion(finding=finding, figure=finding.cv)


def _all_idle(job: JobFigures, gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    if not gpus or any(gpu.utilization is None or gpu.utilization >= IDLE_UTILIZATION for gpu in gpus):
        return
    stall = job.newest.stall
    if job.reports:
        if stall is None and job.ranks and not job.newest.certain_work:  # a simulated GPU is never used
            yield Suspicion(finding=f.GpusUnused(gpus=len(gpus), confidence=f.Confidence.CERTAIN), figure=1.0)
    elif stall is not None and stall.seen.sign not in WORKING:
        yield Suspicion(finding=f.JobIdle(gpus=len(gpus), confidence=f.Confidence.CERTAIN), figure=1.0)


def _growing(gpu: GpuFigures) -> Iterator[Suspicion]:
    growth, total = gpu.growth, gpu.newest.memory_total_bytes
    if growth is None or not total or growth.per_second <= 0.0:
        return
    left = max(0.0, total - growth.used) / growth.per_second
    if left > GROWTH_HORIZON_SECONDS:
        return
    finding = f.GpuMemoryGrowing(
        rank=gpu.newest.rank,
        gpu_uuid=gpu.newest.gpu_uuid,
        node=gpu.newest.node,
        used_bytes=growth.used,
        total_bytes=total,
        bytes_per_second=growth.per_second,
        seconds_left=left,
    )
    yield Suspicion(finding=finding, figure=1.0)


def _skewed(gpus: Sequence[GpuFigures]) -> Iterator[Suspicion]:
    """Return one suspicion for each node: its GPUs share a clock, and the smallest offset is the most exact."""
    offsets: dict[str, float] = {}
    for gpu in gpus:
        offset, node = gpu.clock_offset_seconds, gpu.newest.node
        if offset is not None and (node not in offsets or abs(offset) < abs(offsets[node])):
            offsets[node] = offset
    for node, offset in offsets.items():
        yield Suspicion(
            finding=f.ClockSkewed(node=node, seconds=offset, confidence=f.Confidence.CERTAIN), figure=abs(offset)
        )
