"""Rules about the ranks of one job, each compared with the job's others, and about the job as a whole. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.definitions import DEFINITIONS
from orchestrator.core.diagnosis.figures.estimate import Estimate, above, typical
from orchestrator.core.diagnosis.figures.rank_window import in_lockstep
from orchestrator.core.diagnosis.rendezvous import GATHERING
from orchestrator.core.diagnosis.rules.gpu_rules import WORKING
from orchestrator.core.diagnosis.rules.save_rules import saves_suspicions
from orchestrator.core.diagnosis.rules.suspicion import Suspicion
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.hangs import Sign

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.core.diagnosis.figures.loss_window import LossFigures
    from orchestrator.core.diagnosis.figures.rank_window import RankFigures
    from orchestrator.core.diagnosis.figures.windows import JobFigures
    from orchestrator.core.diagnosis.observation import JobSeen, StallSeen

APART: Final = 1.03
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
        for suspicion in (one for alike in _groups(job, ranks) for one in _slow(job, alike)):
            key = f.key_of(suspicion.finding)
            if key not in slow or slow[key].figure < suspicion.figure:
                slow[key] = suspicion
    yield from slow.values()
    yield from _starved(job)
    yield from _at_breakpoints(job.newest)
    yield from _still(job.newest)


def job_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the whole job's figures."""
    for loss in job.losses:
        yield from _loss(loss)
    yield from saves_suspicions(job)
    if job.late_seconds is not None:
        late = f.DaemonOverloaded(late_seconds=job.late_seconds, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=late, figure=job.late_seconds)
    restarts = job.newest.restarts
    if restarts is not None:
        finding = f.RestartLoop(
            restarts=restarts.count,
            seconds=restarts.seconds,
            cause=restarts.cause,
            total=restarts.total,
            confidence=f.Confidence.CERTAIN,
        )
        yield Suspicion(finding=finding, figure=restarts.count / RESTARTS)


def _groups(job: JobFigures, ranks: Sequence[RankFigures]) -> list[list[RankFigures]]:
    """Group ranks by the models of their GPUs: a slower model is no fault."""
    models: dict[int, set[str]] = {}
    for gpu in job.newest.gpus:
        models.setdefault(gpu.rank, set()).add(gpu.model)
    groups: dict[tuple[str, ...], list[RankFigures]] = {}
    for rank in ranks:
        groups.setdefault(tuple(sorted(models.get(rank.rank, ()))), []).append(rank)
    return [group for group in groups.values() if len(group) > 1]


def _slow(job: JobFigures, ranks: Sequence[RankFigures]) -> Iterator[Suspicion]:
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
        finding = f.RankSlow(
            rank=rank.rank,
            gpu_uuid=gpus[0].gpu_uuid if len(gpus) == 1 else "",
            node=gpus[0].node if gpus else "",
            factor=found.factor,
            seconds=found.seconds,
            usual_seconds=found.usual_seconds,
            awaited=lockstep,
        )
        yield Suspicion(finding=finding, figure=found.figure)


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
    least = APART * median(one.value for one in others)
    if len(own) < 2 or min(one.value for one in own) < least or max(one.value for one in others) > middle.value:
        return
    found = _slower(max(rank.step.value for rank in ranks), middle, others)
    if found is not None and found.figure >= DEFINITIONS[f.NodeSlow].closes_at:
        node = f.NodeSlow(node=slowest, factor=found.factor, ranks=len(own))
        yield Suspicion(finding=node, figure=found.figure)


def _starved(job: JobFigures) -> Iterator[Suspicion]:
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
        finding = f.InputStarved(share=share, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=share)
        return
    for rank, share in starved.items():
        finding = f.InputStarved(rank=rank, share=share, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=share)


def _at_breakpoints(job: JobSeen) -> Iterator[Suspicion]:
    for terminal in job.terminals:
        if terminal.stopped_at is not None:
            finding = f.RankAtBreakpoint(rank=terminal.rank, confidence=f.Confidence.CERTAIN)
            yield Suspicion(finding=finding, figure=1.0)


def _still(job: JobSeen) -> Iterator[Suspicion]:
    stall = job.stall
    if stall is None:
        return
    if stall.seen.sign is Sign.STOPPED:
        finding = f.RankStopped(rank=stall.seen.rank, seen=stall.seen, late=stall.late, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=1.0)
        return
    if stall.seen.sign in GATHERING:
        yield _gathering(stall)
        return
    if not stall.late.by_steps:
        return
    allowed = max(d.STILL_SECONDS, d.STILL_STEPS * stall.longest_step, d.STILL_PAUSES * stall.longest_pause) * (
        d.WORKING_FACTOR if stall.seen.sign in WORKING else 1.0
    )
    still = f.NoStep(rank=stall.seen.rank, seen=stall.seen, late=stall.late, confidence=f.Confidence.CERTAIN)
    yield Suspicion(finding=still, figure=1.0 if stall.proven else stall.late.still_seconds / allowed)


def _gathering(stall: StallSeen) -> Suspicion:
    wrong = stall.seen.sign is Sign.WORLD_SIZE
    cls = f.WrongWorldSize if wrong else f.RendezvousIncomplete
    allowed = d.WORLD_SIZE_SECONDS if wrong else d.RENDEZVOUS_SECONDS
    finding = cls(rank=stall.seen.rank, seen=stall.seen, late=stall.late, confidence=f.Confidence.CERTAIN)
    return Suspicion(finding=finding, figure=stall.late.still_seconds / allowed)


def _loss(loss: LossFigures) -> Iterator[Suspicion]:
    if not math.isfinite(loss.value):
        value = "NaN" if math.isnan(loss.value) else "infinite"
        finding = f.LossNotFinite(metric=loss.metric, value=value, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=1.0)
        return
    if loss.metric.lower() not in TRAINING_LOSSES:
        return
    if loss.jump is not None:
        jumped = f.LossJumped(metric=loss.metric, value=loss.now, usual=loss.usual)
        yield Suspicion(finding=jumped, figure=loss.jump)
    if loss.usual_steps is not None:
        figure = loss.steps / max(d.FLAT_STEPS, d.FLAT_FACTOR * loss.usual_steps)
    elif not loss.changed:
        figure = min(loss.steps / d.NEVER_CHANGED_STEPS, loss.seconds / d.NEVER_CHANGED_SECONDS)
    else:
        return
    flat = f.LossFlat(metric=loss.metric, value=loss.value, steps=loss.steps)
    yield Suspicion(finding=flat, figure=figure)
