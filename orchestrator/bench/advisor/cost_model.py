"""The cost of a training step on n ranks, from a probe of one rank and a calibration of the machine. Pure.

    step(n, B) = slowdown(n) * (step(1, B / n) + wrapper) + exposed(n) + wait(n)

*step(1, b)* is measured at up to three batch sizes and interpolated. *wrapper* is what DDP adds on one rank: its copies of
gradients into buckets. *slowdown(n)* is the factor by which n ranks slow each other down: shared memory and cores. Where ranks
share processors, the probe measures it with the model's own steps for one number of ranks; reference models give the others.
*wait(n)* is the time that ranks wait for the slowest rank at each step: interpolated from the reference models' waits, by the length of a step. *exposed(n)* follows from the moments at which DDP hands over its
buckets, the links' time for each, and the share of communication that computation beside it can hide.

Links are a latency and a bandwidth between each two of the measured sizes; beyond the largest the last bandwidth holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.analysis.statistics import Interval
from orchestrator.bench.plan import Cell
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


MODEL_ERROR: Final = 0.03
"""Error of the formula, as a share of a step: kept even where every measurement agrees."""
SEVERAL_RANKS_ERROR: Final = 0.1
"""The same for several ranks, which interfere in more ways than the calibration measures."""
EXPOSED_ERROR: Final = 0.5
"""Error of exposed communication, as a share of it: links are calibrated when nothing else uses them."""
_NORMAL_975: Final = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePoint:
    """A step of one rank at one batch size: its seconds, those of its backward, and their relative standard error."""

    batch: int
    step: float
    backward: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, and the share of backward after which they are ready."""

    ready: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """Factor by which a step takes longer beside those of ``ranks - 1`` neighbours, and its relative standard error."""

    ranks: int
    factor: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurements of a few steps on one rank. Points ascend by batch; there is at least one. ``crowding`` where it was measured."""

    parameters: int
    gradient_bytes: int
    points: tuple[ProbePoint, ...]
    wrapper: float
    buckets: tuple[Bucket, ...]
    steps: int
    seconds: float
    crowding: Crowding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Time of an all-reduce of this many ranks, by bytes, ascending; ``hides`` is the share that computation can hide."""

    points: tuple[tuple[int, float], ...]
    hides: float = 1.0

    def seconds(self, size: int) -> float:
        """Return the seconds of one all-reduce."""
        return interpolate(self.points, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of n ranks on a machine: links, slowdown by the reference models' bytes of gradients.

    ``waits`` are seconds that ranks wait for the slowest in a step, by the seconds of the step, ascending.
    """

    links: Mapping[int, Links]
    slowdowns: Mapping[int, tuple[tuple[int, float], ...]]
    waits: Mapping[int, tuple[tuple[float, float], ...]]

    def knows(self, ranks: int) -> bool:
        """Whether this many ranks could be measured."""
        return ranks in self.slowdowns and (ranks == 1 or ranks in self.links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A configuration's throughput, and the parts of its step, in seconds."""

    cell: Cell
    throughput: Interval
    step: float
    compute: float
    communication: float
    exposed: float
    extrapolated: bool

    @property
    def margin(self) -> float:
        """Return half of the interval, as a share of the mean."""
        assert self.throughput.low is not None
        return 1 - self.throughput.low / self.throughput.value


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value on straight lines through the points, extrapolated by the outer ones; never below 0."""
    if len(points) == 1:
        return points[0][1]
    upper = next((i for i in range(1, len(points) - 1) if at <= points[i][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def predict(cell: Cell, probe: Probe, calibration: Calibration) -> Prediction:
    """Predict a configuration; the calibration must have its number of ranks."""
    at = cell.per_rank
    step = _positive(interpolate([(p.batch, p.step) for p in probe.points], at), probe)
    backward = min(step, interpolate([(p.batch, p.backward) for p in probe.points], at))
    slowdown, disagreement = slowdown_of(cell.ranks, probe, calibration)
    communication = exposed = 0.0
    if cell.ranks > 1:
        step += probe.wrapper
        links = calibration.links[cell.ranks]
        communication = math.fsum(links.seconds(bucket.bytes) for bucket in probe.buckets)
        exposed = exposed_seconds(probe.buckets, backward * slowdown, links)
        exposed += interpolate(calibration.waits[cell.ranks], slowdown * step)
    compute = slowdown * step
    whole = compute + exposed
    error = math.hypot(
        MODEL_ERROR if cell.ranks == 1 else SEVERAL_RANKS_ERROR,
        max(p.error for p in probe.points),
        disagreement * compute / whole,
        EXPOSED_ERROR * exposed / whole,
    )
    extrapolated = not probe.points[0].batch <= at <= probe.points[-1].batch
    return Prediction(
        cell=cell,
        throughput=_interval(cell.batch / whole, _NORMAL_975 * error * (2 if extrapolated else 1)),
        step=whole,
        compute=compute,
        communication=communication,
        exposed=exposed,
        extrapolated=extrapolated,
    )


def _positive(step: float, probe: Probe) -> float:
    """Return a positive value: a line through noisy points may cross zero; a step takes at least half the fastest."""
    return max(step, 0.5 * min(p.step for p in probe.points))


def slowdown_of(ranks: int, probe: Probe, calibration: Calibration) -> tuple[float, float]:
    """Return the slowdown of a step while this many ranks make one, and its error.

    It is the model's own where the probe measured this number. For fewer ranks the reference models' slowdown is scaled, by logarithms, so
    that it equals the model's own at the number of the probe.
    """
    factor, disagreement = _by_references(calibration.slowdowns[ranks], probe.gradient_bytes)
    crowding = probe.crowding
    if crowding is None or ranks == 1:
        return factor, disagreement
    whole, _ = _by_references(calibration.slowdowns[crowding.ranks], probe.gradient_bytes)
    if ranks == crowding.ranks or whole <= 1:
        share = (ranks - 1) / (crowding.ranks - 1)
    else:
        share = max(0.0, math.log(factor) / math.log(whole))
    return crowding.factor**share, crowding.error


def _by_references(points: Sequence[tuple[int, float]], gradient_bytes: int) -> tuple[float, float]:
    """Interpolate between the reference models by the logarithm of their bytes; return also their disagreement."""
    if len(points) == 1:
        return points[0][1], 0.0
    ends = [math.log(size) for size, _ in points]
    at = min(max(math.log(max(1, gradient_bytes)), ends[0]), ends[-1])
    factors = [factor for _, factor in points]
    found = interpolate(list(zip(ends, factors, strict=True)), at)
    return found, (max(factors) - min(factors)) / (4 * found)


def exposed_seconds(buckets: Sequence[Bucket], backward: float, links: Links) -> float:
    """Return how long backward waits after its own end: buckets are reduced one after the other, each once it is ready."""
    end, total = 0.0, 0.0
    for bucket in sorted(buckets, key=lambda one: one.ready):
        seconds = links.seconds(bucket.bytes)
        end = max(end, bucket.ready * backward) + seconds
        total += seconds
    best = max(0.0, end - backward)
    return best + (total - best) * (1 - links.hides) if total > best else total


def _interval(mean: float, margin: float) -> Interval:
    margin = min(margin, 0.9)
    return Interval(mean, mean * (1 - margin), mean * (1 + margin))


MAX_PAYING_BATCH: Final = 1 << 17
_TIE: Final = 0.01
"""Ranks that gain less than this are not worth their GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Predictions for one global batch by ranks, the number to take, and whether the intervals make it certain."""

    batch: int
    predictions: tuple[Prediction, ...]
    choice: Prediction
    certain: bool
    rival: Prediction | None

    @property
    def single(self) -> Prediction | None:
        """Return the prediction for one rank, if it was requested."""
        return next((one for one in self.predictions if one.cell.ranks == 1), None)


def advise(cells: Iterable[Cell], probe: Probe, calibration: Calibration) -> tuple[Advice, ...]:
    """Return the advice for each global batch among the cells, for the numbers of ranks that the calibration has."""
    by_batch: dict[int, list[Prediction]] = {}
    for cell in cells:
        if calibration.knows(cell.ranks):
            by_batch.setdefault(cell.batch, []).append(predict(cell, probe, calibration))
    return tuple(_choose(batch, sorted(found, key=_ranks)) for batch, found in sorted(by_batch.items()))


def _ranks(prediction: Prediction) -> int:
    return prediction.cell.ranks


def _choose(batch: int, predictions: Sequence[Prediction]) -> Advice:
    best = max(one.throughput.value for one in predictions)
    choice = next(one for one in predictions if one.throughput.value >= best * (1 - _TIE))
    others = [one for one in predictions if one is not choice]
    rival = max(others, key=lambda one: one.throughput.high or 0.0, default=None)
    certain = rival is None or (choice.throughput.low or 0.0) > (rival.throughput.high or 0.0)
    return Advice(batch=batch, predictions=tuple(predictions), choice=choice, certain=certain, rival=rival)


def paying_batch(ranks: int, probe: Probe, calibration: Calibration) -> int | None:
    """Return the smallest global batch (ranks times a power of two) at which this many ranks beat one; None if none does."""
    per_rank = 1
    while (batch := per_rank * ranks) <= MAX_PAYING_BATCH:
        single, several = (predict(Cell(batch=batch, ranks=n), probe, calibration) for n in (1, ranks))
        if several.throughput.value > single.throughput.value * (1 + _TIE):
            return batch
        per_rank *= 2
    return None


def efficiency(prediction: Prediction, single: Prediction | None) -> float | None:
    """Return the speed-up against one rank, divided by the number of ranks; None without ``single``."""
    if single is None:
        return None
    return prediction.throughput.value / single.throughput.value / prediction.cell.ranks


def reason(advice: Advice, probe: Probe) -> str:
    """Return the reason of the choice."""
    chosen, single = advice.choice, advice.single
    megabytes = probe.gradient_bytes / 1e6
    if chosen.cell.ranks > 1:
        gain = "" if single is None else f"{chosen.throughput.value / single.throughput.value:.2f}x one rank: "
        return f"{gain}reducing {megabytes:.3g} MB of gradients adds {_ms(chosen.exposed)} to {_ms(chosen.compute)} of computation"
    if advice.rival is None:
        return "no other number of ranks could be measured"
    saved = chosen.compute - advice.rival.compute
    return (
        f"{advice.rival.cell.ranks} ranks save {_ms(max(0.0, saved))} of computation per step and wait {_ms(advice.rival.exposed)} "
        f"for {megabytes:.3g} MB of gradients"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def sentence(advice: Advice, probe: Probe) -> str:
    """Return the advice as a sentence for people."""
    chosen = advice.choice.cell.ranks
    what = f"global batch {advice.batch}: {plural(chosen, 'rank')}"
    if advice.certain or advice.rival is None:
        return f"{what}; {reason(advice, probe)}"
    return (
        f"{what} by a little, but I can't tell {chosen} from {advice.rival.cell.ranks} (within {advice.choice.margin:.0%}): measure with "
        f"`orch bench --batch-sizes {advice.batch}`; {reason(advice, probe)}"
    )


def advice_json(advice: Advice, probe: Probe) -> dict[str, Any]:
    """Return one entry of ``advice``, as JSON values."""
    return {
        "batch_size": advice.batch,
        "ranks": advice.choice.cell.ranks,
        "certain": advice.certain,
        "reason": reason(advice, probe),
        "predictions": [
            {
                "ranks": one.cell.ranks,
                "batch_size_per_rank": one.cell.per_rank,
                "samples_per_second": one.throughput.value,
                "interval_95": one.throughput.bounds,
                "efficiency": efficiency(one, advice.single),
                "gpu_seconds_per_million_samples": one.cell.ranks * 1e6 / one.throughput.value,
                "step_ms": one.step * 1e3,
                "compute_ms": one.compute * 1e3,
                "communication_ms": one.communication * 1e3,
                "exposed_communication_ms": one.exposed * 1e3,
                "extrapolated": one.extrapolated,
            }
            for one in advice.predictions
        ],
    }
