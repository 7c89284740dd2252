"""Rules about the ranks of one job, each compared with the job's others, and about the job as a whole. Pure."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis import definitions as d
from orchestrator.core.diagnosis.gpu_rules import WORKING
from orchestrator.core.diagnosis.suspicion import Suspicion
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.hangs import Sign

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.core.diagnosis.observation import JobSeen, SavesSeen
    from orchestrator.core.diagnosis.windows import JobFigures, LossFigures, RankFigures

LOCKSTEP: Final = 1.1
"""Ranks whose steps take the same time to within this factor meet in a collective at every step."""
APART: Final = 1.03
"""The faster quarter of a slow rank's own times is above the others' usual one by this factor."""
LEAST_SECONDS: Final = 0.0002
"""The clock of steps is no better than this."""
RESTARTS: Final = 3.0
TRAINING_LOSSES: Final = frozenset({"loss", "train_loss", "train/loss", "training_loss", "loss/train"})
"""A validation loss is the same from one evaluation to the next."""


def rank_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Everything that the ranks' figures may mean."""
    for alike in _groups(job):
        yield from _slow(job, alike)
    yield from _starved(job)
    yield from _still(job.newest)


def job_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Everything that the whole job's figures may mean."""
    for loss in job.losses:
        yield from _loss(loss)
    yield from _saves(job.newest.saves)
    restarts = job.newest.restarts
    if restarts is not None:
        finding = f.RestartLoop(
            restarts=restarts.count,
            seconds=restarts.seconds,
            cause=restarts.cause,
            confidence=f.Confidence.CERTAIN,
        )
        yield Suspicion(finding=finding, figure=restarts.count / RESTARTS)


def _groups(job: JobFigures) -> list[list[RankFigures]]:
    """Ranks on the same models of GPUs: a slower model is slower, and no fault."""
    models: dict[int, set[str]] = {}
    for gpu in job.newest.gpus:
        models.setdefault(gpu.rank, set()).add(gpu.model)
    groups: dict[tuple[str, ...], list[RankFigures]] = {}
    for rank in job.ranks:
        groups.setdefault(tuple(sorted(models.get(rank.rank, ()))), []).append(rank)
    return [group for group in groups.values() if len(group) > 1]


def _slow(job: JobFigures, ranks: Sequence[RankFigures]) -> Iterator[Suspicion]:
    steps = [rank.step_seconds for rank in job.ranks]
    lockstep = max(steps) <= LOCKSTEP * min(steps)
    nodes = {finding.node: finding for finding in _slow_nodes(ranks, lockstep=lockstep)}
    for node in nodes.values():
        yield Suspicion(finding=node, figure=node.factor)
    for rank in ranks:
        if rank.node in nodes:
            continue  # its node is what is slow
        others = [other for other in ranks if other is not rank]
        figure = _own(rank, others) if lockstep else _step(rank, others)
        if figure is None:
            continue
        seconds, usual = figure
        least = max(LEAST_SECONDS, d.LEAST_STEP_SHARE * rank.step_seconds)
        if usual <= 0 or seconds - usual < least:
            continue
        gpus = [gpu for gpu in job.newest.gpus if gpu.rank == rank.rank]
        finding = f.RankSlow(
            rank=rank.rank,
            gpu_uuid=gpus[0].gpu_uuid if len(gpus) == 1 else "",
            node=gpus[0].node if gpus else "",
            factor=seconds / usual,
            seconds=seconds,
            usual_seconds=usual,
            awaited=lockstep,
        )
        yield Suspicion(finding=finding, figure=finding.factor)


def _slow_nodes(ranks: Sequence[RankFigures], *, lockstep: bool) -> Iterator[f.NodeSlow]:
    """Nodes whose every rank, two at least, is slower than every rank of the others."""
    times = {rank.rank: rank.own_seconds if lockstep else rank.step_seconds for rank in ranks}
    nodes: dict[str, list[float]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(times[rank.rank] or 0.0)
    if "" in nodes or len(nodes) < 2 or min(map(min, nodes.values())) <= 0.0:
        return
    slowest = max(nodes, key=lambda node: median(nodes[node]))
    own, others = nodes[slowest], [each for node, known in nodes.items() if node != slowest for each in known]
    factor = median(own) / median(others)
    if len(own) < 2 or min(own) <= APART * max(others) or factor < d.DEFINITIONS[f.NodeSlow].closes_at:
        return
    if median(own) - median(others) >= max(LEAST_SECONDS, d.LEAST_STEP_SHARE * max(r.step_seconds for r in ranks)):
        yield f.NodeSlow(node=slowest, factor=factor, ranks=len(own))


def _own(rank: RankFigures, others: Sequence[RankFigures]) -> tuple[float, float] | None:
    """The rank's own part of a step, and the others'; None where that is not known of all."""
    known = [other.own_seconds for other in others if other.own_seconds is not None]
    if rank.own_seconds is None or len(known) < len(others):
        return None
    usual = median(known)
    if rank.own_low is not None and rank.own_low < APART * usual:
        return None  # it is sometimes faster than the others, too
    return rank.own_seconds, usual


def _step(rank: RankFigures, others: Sequence[RankFigures]) -> tuple[float, float] | None:
    """Whole steps of ranks that do not wait for each other; None where the two overlap, as with batches of varied length."""
    if rank.low <= median(other.high for other in others):
        return None
    return rank.step_seconds, median(other.step_seconds for other in others)


def _starved(job: JobFigures) -> Iterator[Suspicion]:
    shares = {
        rank.rank: rank.data_seconds / max(rank.step_seconds, rank.data_seconds)
        for rank in job.ranks
        if rank.data_seconds
    }
    definition = d.DEFINITIONS[f.InputStarved]
    starved = {rank: share for rank, share in shares.items() if share >= definition.closes_at}
    together = len(starved) > 1 and 2 * len(starved) > len(job.ranks)
    if together:
        share = median(starved.values())
        finding = f.InputStarved(share=share, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=share)
        return
    for rank, share in starved.items():
        finding = f.InputStarved(rank=rank, share=share, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=share)


def _still(job: JobSeen) -> Iterator[Suspicion]:
    stall = job.stall
    if stall is None:
        return
    if stall.seen.sign is Sign.STOPPED:
        finding = f.RankStopped(rank=stall.seen.rank, seen=stall.seen, late=stall.late, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=1.0)
        return
    if not stall.late.by_steps:
        return
    allowed = max(d.STILL_SECONDS, d.STILL_STEPS * stall.longest_step, d.STILL_PAUSES * stall.longest_pause) * (
        d.WORKING_FACTOR if stall.seen.sign in WORKING else 1.0
    )
    still = f.NoStep(rank=stall.seen.rank, seen=stall.seen, late=stall.late, confidence=f.Confidence.CERTAIN)
    yield Suspicion(finding=still, figure=1.0 if stall.proven else stall.late.still_seconds / allowed)


def _loss(loss: LossFigures) -> Iterator[Suspicion]:
    if not math.isfinite(loss.value):
        value = "NaN" if math.isnan(loss.value) else "infinite"
        finding = f.LossNotFinite(metric=loss.metric, value=value, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=1.0)
        return
    if loss.metric.lower() not in TRAINING_LOSSES:
        return
    if loss.usual_steps is not None:
        figure = loss.steps / max(d.FLAT_STEPS, d.FLAT_FACTOR * loss.usual_steps)
    elif not loss.changed:
        figure = min(loss.steps / d.NEVER_CHANGED_STEPS, loss.seconds / d.NEVER_CHANGED_SECONDS)
    else:
        return
    flat = f.LossFlat(metric=loss.metric, value=loss.value, steps=loss.steps)
    yield Suspicion(finding=flat, figure=figure)


def _saves(saves: SavesSeen) -> Iterator[Suspicion]:
    if saves.failures:
        finding = f.SavesFailing(failures=saves.failures, said=saves.said, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=float(saves.failures))
    stall, interval = saves.stall_seconds, saves.interval_seconds
    if stall is not None and interval and stall >= d.LEAST_STALL_SECONDS:
        slow = f.SavesSlow(seconds=stall, interval_seconds=interval, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=slow, figure=stall / interval)
    if saves.unsaved_seconds is None:
        return
    meant = 3.0 * (saves.interval_seconds or 0.0)
    allowed = max(d.UNSAVED_SECONDS, meant) if saves.ever or saves.interval_seconds else d.NEVER_SAVED_SECONDS
    rare = f.SavesRare(
        seconds=saves.unsaved_seconds, interval_seconds=saves.interval_seconds, confidence=f.Confidence.CERTAIN
    )
    yield Suspicion(finding=rare, figure=saves.unsaved_seconds / allowed)
