"""Derives advice from predictions: the number of ranks for each batch size, the reason, and from which batch size more ranks pay. Pure.

A choice is *certain* when no other number of ranks could be faster within the intervals of both. Otherwise the advice says that it is uncertain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.bench.advisor.cost_model import Calibration, Prediction, Probe, predict
from orchestrator.bench.plan import Cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_PAYING_BATCH: Final = 1 << 17
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
    best = max(one.throughput.mean for one in predictions)
    choice = next(one for one in predictions if one.throughput.mean >= best * (1 - _TIE))
    others = [one for one in predictions if one is not choice]
    rival = max(others, key=lambda one: one.throughput.high or 0.0, default=None)
    certain = rival is None or (choice.throughput.low or 0.0) > (rival.throughput.high or 0.0)
    return Advice(batch=batch, predictions=tuple(predictions), choice=choice, certain=certain, rival=rival)


def paying_batch(ranks: int, probe: Probe, calibration: Calibration) -> int | None:
    """Return the smallest global batch (ranks times a power of two) at which this many ranks beat one; None if none does."""
    per_rank = 1
    while (batch := per_rank * ranks) <= MOST_PAYING_BATCH:
        single, several = (predict(Cell(batch=batch, ranks=n), probe, calibration) for n in (1, ranks))
        if several.throughput.mean > single.throughput.mean * (1 + _TIE):
            return batch
        per_rank *= 2
    return None


def efficiency(prediction: Prediction, single: Prediction | None) -> float | None:
    """Return the speed-up against one rank, divided by the number of ranks; None without ``single``."""
    if single is None:
        return None
    return prediction.throughput.mean / single.throughput.mean / prediction.cell.ranks


def reason(advice: Advice, probe: Probe) -> str:
    """Return the reason of the choice."""
    chosen, single = advice.choice, advice.single
    megabytes = probe.gradient_bytes / 1e6
    if chosen.cell.ranks > 1:
        gain = "" if single is None else f"{chosen.throughput.mean / single.throughput.mean:.2f}x one rank: "
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
    what = f"global batch {advice.batch}: {chosen} rank{'s' * (chosen != 1)}"
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
                "samples_per_second": one.throughput.mean,
                "interval_95": one.throughput.as_json(),
                "efficiency": efficiency(one, advice.single),
                "gpu_seconds_per_million_samples": one.cell.ranks * 1e6 / one.throughput.mean,
                "step_ms": one.step * 1e3,
                "compute_ms": one.compute * 1e3,
                "communication_ms": one.communication * 1e3,
                "exposed_communication_ms": one.exposed * 1e3,
                "extrapolated": one.extrapolated,
            }
            for one in advice.predictions
        ],
    }
