"""The configurations that the claims need, and the claimed quantities as ratios of their runs. Pure.

Batches are per rank: more ranks make a larger global batch, as in the document that claims it. Each ratio is of runs of the same round.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from orchestrator.bench.plan import MODELS, Cell
from orchestrator.bench.results import exposed_share
from orchestrator.bench.statistics import mean_interval, ratio_interval
from orchestrator.bench.suite.claims import Measured, Quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.bench.results import CellResult

PASSES: Final = 4
"""Number of passes of a step with accumulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The suite's configurations by their part in it."""

    single: Cell
    ddp: tuple[Cell, ...]
    data_parallel: tuple[Cell, ...]
    mixed: Cell
    accumulated: Cell
    other_models: tuple[Cell, ...]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All configurations, each once."""
        every = (self.single, *self.ddp, *self.data_parallel, self.mixed, self.accumulated, *self.other_models)
        return tuple(dict.fromkeys(every))


def plan_of(*, model: str, per_rank: int, ranks: Sequence[int], gpus: int, mixed: str) -> Plan:
    """Return the plan for a batch per rank and numbers of ranks; DataParallel on GPUs. ``mixed``: lower precision."""
    several = sorted(n for n in ranks if n > 1)
    most = several[-1] if several else 1
    others = [name for name in MODELS if name != model] if most > 1 else []
    return Plan(
        single=Cell(batch=per_rank, ranks=1),
        ddp=tuple(Cell(batch=per_rank * n, ranks=n) for n in several),
        data_parallel=tuple(Cell(batch=per_rank * n, ranks=1, gpus=n) for n in several if n <= gpus),
        mixed=Cell(batch=per_rank, ranks=1, precision=mixed),
        accumulated=Cell(batch=per_rank, ranks=1, precision=mixed, accumulate=PASSES),
        other_models=tuple(Cell(batch=per_rank * most, ranks=most, model=name) for name in others),
    )


def quantities(
    plan: Plan, results: Mapping[Cell, CellResult], *, on_gpus: bool
) -> dict[tuple[Quantity, int], Measured]:
    """Return the quantities whose configurations both have runs. Memory is reported on GPUs alone: a process's is mostly torch itself."""
    usable = {cell: one for cell, one in results.items() if one.runs}
    found = [
        *_of_ddp(plan, usable, on_gpus=on_gpus),
        *_of_communication(plan, usable, on_gpus=on_gpus),
        *_of_data_parallel(plan, usable),
        *_of_precision(plan, usable, on_gpus=on_gpus),
    ]
    return {(one.quantity, one.gpus): one for one in found}


def _of_ddp(plan: Plan, usable: Mapping[Cell, CellResult], *, on_gpus: bool) -> Iterator[Measured]:
    single = usable.get(plan.single)
    for cell in plan.ddp:
        one = usable.get(cell)
        if one is None or single is None:
            continue
        speed_up = ratio_interval(one.throughputs, single.throughputs)
        efficiency = speed_up.divided(cell.ranks)
        yield Measured(quantity=Quantity.DDP_SPEED_UP, gpus=cell.ranks, interval=speed_up, on_gpus=on_gpus)
        yield Measured(quantity=Quantity.EFFICIENCY, gpus=cell.ranks, interval=efficiency, on_gpus=on_gpus)
        if on_gpus:
            memory = ratio_interval(*(_peaks(result) for result in (one, single)))
            yield Measured(quantity=Quantity.DDP_MEMORY, gpus=cell.ranks, interval=memory, on_gpus=True)


def _of_communication(plan: Plan, usable: Mapping[Cell, CellResult], *, on_gpus: bool) -> Iterator[Measured]:
    """Yield the median share over the models in each round, on the most ranks; the claim is about two GPUs and more."""
    shares = [exposed_share(usable[cell]) for cell in (*plan.ddp[-1:], *plan.other_models) if cell in usable]
    medians = [median(one) for one in zip(*shares, strict=False)]
    if medians:
        interval = mean_interval(medians)
        yield Measured(quantity=Quantity.COMMUNICATION_SHARE, gpus=2, interval=interval, on_gpus=on_gpus)


def _of_data_parallel(plan: Plan, usable: Mapping[Cell, CellResult]) -> Iterator[Measured]:
    single = usable.get(plan.single)
    for cell in plan.data_parallel:
        one = usable.get(cell)
        if one is None or single is None:
            continue
        speed_up = ratio_interval(one.throughputs, single.throughputs)
        memory = ratio_interval([run.all_memory_bytes for run in one.runs], _peaks(single))
        yield Measured(quantity=Quantity.DATA_PARALLEL_SPEED_UP, gpus=cell.gpus, interval=speed_up, on_gpus=True)
        yield Measured(quantity=Quantity.DATA_PARALLEL_MEMORY, gpus=cell.gpus, interval=memory, on_gpus=True)
        ddp = usable.get(Cell(batch=cell.batch, ranks=cell.gpus))
        if ddp is not None:
            against = ratio_interval(ddp.throughputs, one.throughputs)
            yield Measured(quantity=Quantity.DDP_AGAINST_DATA_PARALLEL, gpus=cell.gpus, interval=against, on_gpus=True)


def _of_precision(plan: Plan, usable: Mapping[Cell, CellResult], *, on_gpus: bool) -> Iterator[Measured]:
    single = usable.get(plan.single)
    for cell, speed, memory in (
        (plan.mixed, Quantity.MIXED_SPEED_UP, Quantity.MIXED_MEMORY),
        (plan.accumulated, Quantity.ACCUMULATED_SPEED_UP, Quantity.ACCUMULATED_MEMORY),
    ):
        one = usable.get(cell)
        if one is None or single is None:
            continue
        faster = ratio_interval(one.throughputs, single.throughputs)
        yield Measured(quantity=speed, gpus=1, interval=faster, on_gpus=on_gpus)
        if on_gpus:
            smaller = ratio_interval(_peaks(one), _peaks(single))
            yield Measured(quantity=memory, gpus=1, interval=smaller, on_gpus=True)


def _peaks(result: CellResult) -> list[float]:
    return [float(run.peak_memory_bytes) for run in result.runs]
