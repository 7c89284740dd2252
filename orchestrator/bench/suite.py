"""`orch bench --suite training`: compares the claims of a training system's documentation with measurements made here.

The claims are about GPUs that the documentation does not name; measurements on processors are shown beside them and decide nothing.
Batches are per rank: more ranks make a larger global batch, as in that document. Each ratio is of runs of the same round.
Writes ``training_suite_{model}.json`` and ``.md``.
"""

from __future__ import annotations

import enum
import json
import os
import time
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from orchestrator.analysis.statistics import Interval
from orchestrator.bench.benchmark import measure
from orchestrator.bench.plan import MODELS, BenchError, Cell, check, ranks_of
from orchestrator.bench.report import table
from orchestrator.bench.results import MIB, cell_json, exposed_share
from orchestrator.bench.statistics import mean_interval, ratio_interval
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.bench.benchmark import Machine
    from orchestrator.bench.plan import BenchRequest
    from orchestrator.bench.results import CellResult


class Quantity(enum.StrEnum):
    """Subjects of the claims."""

    DATA_PARALLEL_SPEED_UP = "data_parallel_speed_up"
    DATA_PARALLEL_MEMORY = "data_parallel_memory"
    DDP_SPEED_UP = "ddp_speed_up"
    DDP_MEMORY = "ddp_memory"
    DDP_AGAINST_DATA_PARALLEL = "ddp_against_data_parallel"
    EFFICIENCY = "efficiency"
    MIXED_SPEED_UP = "mixed_speed_up"
    MIXED_MEMORY = "mixed_memory"
    ACCUMULATED_SPEED_UP = "accumulated_speed_up"
    ACCUMULATED_MEMORY = "accumulated_memory"
    COMMUNICATION_SHARE = "communication_share"


class Finding(enum.StrEnum):
    """Result of comparing a claim with the measurement."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNCLEAR = "unclear"
    NEEDS_HARDWARE = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Statement that a quantity on a number of GPUs is at least, or at most, a value."""

    quantity: Quantity
    gpus: int
    value: float
    at_least: bool
    text: str
    note: str = ""


_Q = Quantity
CLAIMS: Final = tuple(
    Claim(quantity=quantity, gpus=gpus, value=value, at_least=sign == ">=", text=text, note=note[0] if note else "")
    for quantity, gpus, sign, value, text, *note in (
        (_Q.DATA_PARALLEL_SPEED_UP, 4, ">=", 41 / 12, "DataParallel on 4 GPUs: 4,100 samples/s, one GPU 1,200"),
        (_Q.DATA_PARALLEL_MEMORY, 4, "<=", 16.8 / 4.2, "DataParallel on 4 GPUs: 16.8 GB, one GPU 4.2 GB"),
        (_Q.DDP_SPEED_UP, 4, ">=", 43 / 12, "DistributedDataParallel on 4 GPUs: 4,300 samples/s"),
        (_Q.DDP_SPEED_UP, 8, ">=", 82 / 12, "DistributedDataParallel on 8 GPUs: 8,200 samples/s"),
        (_Q.DDP_MEMORY, 4, "<=", 1.0, "DistributedDataParallel: 4.2 GB on each GPU, as on one"),
        (_Q.DDP_AGAINST_DATA_PARALLEL, 4, ">=", 43 / 41, "DistributedDataParallel is faster than DataParallel on 4"),
        (
            *(_Q.EFFICIENCY, 8, ">=", 0.9, "linear scaling: over 90 % efficiency up to 8 GPUs"),
            "its own table makes it 85 %",
        ),
        (_Q.MIXED_SPEED_UP, 1, ">=", 1.8, "mixed precision: 1.8x", "2x elsewhere in the same document"),
        (_Q.MIXED_MEMORY, 1, "<=", 4.2 / 8.4, "mixed precision: half of the memory"),
        (_Q.ACCUMULATED_SPEED_UP, 1, ">=", 1.6, "mixed precision with accumulation: 1.6x"),
        (_Q.ACCUMULATED_MEMORY, 1, "<=", 2.1 / 8.4, "mixed precision with accumulation: a quarter of the memory"),
        (_Q.COMMUNICATION_SHARE, 2, "<=", 0.05, "communication is under 5 % of a step for most models"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A quantity as measured with a number of ranks or GPUs. ``on_gpus``: whether the claims are about such devices."""

    quantity: Quantity
    gpus: int
    interval: Interval
    on_gpus: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A claim, its measurement, and the finding. ``needs`` names the hardware that is missing for it."""

    claim: Claim
    measured: Measured | None
    finding: Finding
    needs: str = ""


def check_claim(claim: Claim, found: Mapping[tuple[Quantity, int], Measured]) -> Checked:
    """Compare a claim with the measurement of the same quantity on the same number of GPUs."""
    measured = found.get((claim.quantity, claim.gpus))
    if measured is None or not measured.on_gpus:
        needs = f"needs {plural(claim.gpus, 'GPU')}"
        return Checked(claim=claim, measured=measured, finding=Finding.NEEDS_HARDWARE, needs=needs)
    return Checked(claim=claim, measured=measured, finding=_finding(claim, measured.interval))


def _finding(claim: Claim, interval: Interval) -> Finding:
    if interval.bounds is None:
        return Finding.UNCLEAR
    low, high = interval.bounds
    better, worse = low >= claim.value, high < claim.value
    if not claim.at_least:
        better, worse = high <= claim.value, low > claim.value
    if better:
        return Finding.HOLDS
    return Finding.FAILS if worse else Finding.UNCLEAR


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
    found: dict[tuple[Quantity, int], Interval] = {}
    usable = {cell: one for cell, one in results.items() if one.runs}
    # The median share over the models in each round, on the most ranks; the claim is about two GPUs and more.
    shares = [exposed_share(one) for _, one in _measured((*plan.ddp[-1:], *plan.other_models), usable)]
    if medians := [median(one) for one in zip(*shares, strict=False)]:
        found[Quantity.COMMUNICATION_SHARE, 2] = mean_interval(medians)
    if (single := usable.get(plan.single)) is not None:
        found |= _against_one(plan, usable, single, on_gpus=on_gpus)
    return {
        key: Measured(quantity=key[0], gpus=key[1], interval=interval, on_gpus=on_gpus)
        for key, interval in found.items()
    }


def _against_one(
    plan: Plan, usable: Mapping[Cell, CellResult], single: CellResult, *, on_gpus: bool
) -> dict[tuple[Quantity, int], Interval]:
    """Return the quantities that are ratios to one rank. DataParallel is planned on GPUs alone."""
    found: dict[tuple[Quantity, int], Interval] = {}
    for cell, one in _measured(plan.ddp, usable):
        speed_up = ratio_interval(one.throughputs, single.throughputs)
        found[Quantity.DDP_SPEED_UP, cell.ranks] = speed_up
        found[Quantity.EFFICIENCY, cell.ranks] = speed_up.divided(cell.ranks)
        if on_gpus:
            found[Quantity.DDP_MEMORY, cell.ranks] = ratio_interval(_peaks(one), _peaks(single))
    for cell, one in _measured(plan.data_parallel, usable):
        found[Quantity.DATA_PARALLEL_SPEED_UP, cell.gpus] = ratio_interval(one.throughputs, single.throughputs)
        together = [float(run.all_memory_bytes) for run in one.runs]
        found[Quantity.DATA_PARALLEL_MEMORY, cell.gpus] = ratio_interval(together, _peaks(single))
        for _, ddp in _measured((Cell(batch=cell.batch, ranks=cell.gpus),), usable):
            against = ratio_interval(ddp.throughputs, one.throughputs)
            found[Quantity.DDP_AGAINST_DATA_PARALLEL, cell.gpus] = against
    for cell, speed, memory in (
        (plan.mixed, Quantity.MIXED_SPEED_UP, Quantity.MIXED_MEMORY),
        (plan.accumulated, Quantity.ACCUMULATED_SPEED_UP, Quantity.ACCUMULATED_MEMORY),
    ):
        for _, one in _measured((cell,), usable):
            found[speed, 1] = ratio_interval(one.throughputs, single.throughputs)
            if on_gpus:
                found[memory, 1] = ratio_interval(_peaks(one), _peaks(single))
    return found


def _measured(cells: Iterable[Cell], usable: Mapping[Cell, CellResult]) -> Iterator[tuple[Cell, CellResult]]:
    """Yield the configurations that have runs."""
    return ((cell, usable[cell]) for cell in cells if cell in usable)


def _peaks(result: CellResult) -> list[float]:
    return [float(run.peak_memory_bytes) for run in result.runs]


def render_suite(
    *,
    request: BenchRequest,
    generated: str,
    device: str,
    plan: Plan,
    results: Mapping[Cell, CellResult],
    checked: Sequence[Checked],
) -> str:
    """Return the whole report."""
    usable = {cell: one for cell, one in results.items() if one.runs}
    where = "processors, over gloo" if device == "cpu" else "GPUs"
    lines = [
        f"# Training suite: {request.model_name}",
        "",
        (
            f"Generated {generated}, on {where}. Batch sizes are per rank: {request.batch_sizes[0]}, so that more ranks make a larger global batch. "
            f"{request.runs} runs per row, {request.steps} timed steps per run, the rows' runs in turn; 95 % bootstrap intervals."
        ),
        "",
        "## Throughput comparison",
        "",
        *_throughput(plan, usable, device),
        "",
        "## Mixed precision and accumulation",
        "",
        *_precision(plan, usable, device),
        "",
        "## Scalability",
        "",
        *_scaling(plan, usable),
        "",
        "## Share of communication",
        "",
        *_communication(request, plan, usable),
        "",
        "## Claims",
        "",
        *claim_lines(checked),
        "",
        *_remarks(device, results),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _throughput(plan: Plan, usable: Mapping[Cell, CellResult], device: str) -> Iterator[str]:
    rows = []
    for cell, one in _measured((plan.single, *plan.data_parallel, *plan.ddp), usable):
        mode = "DataParallel" if cell.gpus else "DistributedDataParallel" if cell.ranks > 1 else "one rank"
        several = cell.gpus or cell.ranks
        rate, interval = f"{one.throughput.value:,.0f}", one.throughput.ends(",.0f", "unknown")
        rows.append((mode, str(several), str(cell.batch // several), rate, interval, _memory(one, device)))
    yield from table(("Training mode", "ranks or GPUs", "batch per rank", "samples/s", "95 % interval", "memory"), rows)


def _memory(one: CellResult, device: str) -> str:
    """Return the memory of all GPUs of the row, as the document counts DataParallel's; for several ranks, of each."""
    if device == "cpu":
        return "needs a GPU"
    most = max(run.all_memory_bytes if one.cell.gpus else run.peak_memory_bytes for run in one.runs)
    return f"{most / MIB:,.0f} MiB {'together' if one.cell.gpus else 'each'}"


def _precision(plan: Plan, usable: Mapping[Cell, CellResult], device: str) -> Iterator[str]:
    single = usable.get(plan.single)
    rows = []
    for cell, name in (
        (plan.single, "fp32"),
        (plan.mixed, f"mixed ({plan.mixed.precision})"),
        (plan.accumulated, f"mixed, the batch in {plan.accumulated.accumulate} passes"),
    ):
        one = usable.get(cell)
        if one is None:
            continue
        speed_up = Interval(1.0) if single is None else ratio_interval(one.throughputs, single.throughputs)
        shown = "1" if one is single else speed_up.ends(".2f", "unknown")
        rows.append((name, f"{one.throughput.value:,.0f}", f"{speed_up.value:.2f}x", shown, _memory(one, device)))
    yield from table(("Configuration", "samples/s", "speed-up", "95 % interval", "memory"), rows)


def _scaling(plan: Plan, usable: Mapping[Cell, CellResult]) -> Iterator[str]:
    single = usable.get(plan.single)
    rows = []
    for cell, one in _measured(plan.ddp if single else (), usable):
        assert single is not None
        speed_up = ratio_interval(one.throughputs, single.throughputs)
        efficiency = speed_up.divided(cell.ranks)
        rows.append(
            (str(cell.ranks), f"{speed_up.value:.2f}x", f"{efficiency.value:.0%}", efficiency.ends(".0%", "unknown"))
        )
    if not rows:
        yield "One rank alone: there is nothing to scale."
        return
    yield from table(("ranks", "speed-up", "efficiency", "95 % interval"), rows)


def _communication(request: BenchRequest, plan: Plan, usable: Mapping[Cell, CellResult]) -> Iterator[str]:
    rows = []
    for cell, one in _measured((*plan.ddp, *plan.other_models), usable):
        share = mean_interval(exposed_share(one))
        hidden = fmean(run.parts.hidden for run in one.runs) * 1e3
        name = cell.model or request.model_name
        rows.append((name, str(cell.ranks), f"{share.value:.0%}", share.ends(".0%", "unknown"), f"{hidden:.3f}"))
    if not rows:
        yield "One rank alone does not communicate."
        return
    yield "The part of a step spent waiting for all-reduces; communication hidden behind computation costs nothing."
    yield ""
    yield from table(("model", "ranks", "exposed share", "95 % interval", "hidden ms"), rows)


def claim_lines(checked: Sequence[Checked]) -> Iterator[str]:
    """Yield the lines of a table of the claims."""
    rows = []
    for one in checked:
        claim, sign = one.claim, "at least" if one.claim.at_least else "at most"
        text = f"{claim.text} ({claim.note})" if claim.note else claim.text
        rows.append((text, f"{sign} {claim.value:.3g}", _found(one), _result_text(one)))
    yield from table(("Claim", "as a ratio", "measured here", "finding"), rows)


def _found(one: Checked) -> str:
    if one.measured is None:
        return ""
    interval = one.measured.interval
    where = "" if one.measured.on_gpus else " on processors"
    return f"{interval.value:.2f} ({interval.ends('.2f', 'unknown')}){where}"


def _result_text(one: Checked) -> str:
    return f"{one.finding.value}: {one.needs}" if one.needs else one.finding.value


def _remarks(device: str, results: Mapping[Cell, CellResult]) -> Iterator[str]:
    failed = [f"- {cell.name}: failed: {one.error}" for cell, one in results.items() if one.error]
    if device == "cpu":
        failed.append(
            "- The claims are of GPUs. Processors have no memory of their own that a model fills, no units for lower precision "
            "that fp32 lacks, and no DataParallel: claims that need GPUs are marked."
        )
    if failed:
        yield from ("## Remarks", "", *failed)


def checked_json(one: Checked) -> dict[str, Any]:
    """Return one entry of ``claims``."""
    return {
        "quantity": one.claim.quantity.value,
        "gpus": one.claim.gpus,
        "claim": one.claim.text,
        "note": one.claim.note or None,
        "at_least" if one.claim.at_least else "at_most": one.claim.value,
        "measured": None if one.measured is None else one.measured.interval.value,
        "interval_95": None if one.measured is None else one.measured.interval.bounds,
        "measured_on": None if one.measured is None else ("gpus" if one.measured.on_gpus else "processors"),
        "finding": one.finding.value,
        "needs": one.needs or None,
    }


SUITES: Final = ("training",)
BATCH: Final = 32
"""Default batch size per rank: that of the document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOutcome:
    """Results of the suite, its report and its files."""

    plan: Plan
    results: Mapping[Cell, CellResult]
    checked: tuple[Checked, ...]
    document: Mapping[str, Any]
    report: str
    files: tuple[Path, ...]


def check_suite(name: str, request: BenchRequest) -> None:
    """Raise BenchError for an unknown suite, or a request with options that it does not support."""
    if name not in SUITES:
        raise BenchError(f"--suite {name} is not known", hint=f"one of: {', '.join(SUITES)}")
    check(request)
    if len(request.batch_sizes) != 1 or request.batch_sizes[0] % PASSES:
        raise BenchError(
            f"--suite training measures one batch size per rank, a multiple of {PASSES}: got "
            f"{','.join(map(str, request.batch_sizes))}",
            hint=f"--batch-sizes {BATCH}",
        )
    if request.precision != "fp32":
        raise BenchError(
            f"--suite training compares fp32 with mixed precision itself, and --precision is {request.precision}",
            hint="leave it out",
        )
    if request.gpu_mode != "auto" or request.scope != "global":
        raise BenchError(
            "--suite training compares one rank with several, with batches per rank: --gpu-mode and --batch-scope have no effect",
            hint="leave both out",
        )


def run_suite(request: BenchRequest, *, environ: Mapping[str, str], note: Callable[[str], None]) -> SuiteOutcome:
    """Measure and write the files. Raises BenchError for a request that cannot be run, or when no run ended."""
    machine, measured, environment = measure(request, environ, note, lambda machine: _plan(request, machine).cells)
    results = {one.cell: one for one in measured}
    return _write(request, machine, _plan(request, machine), results, environment)


def _plan(request: BenchRequest, machine: Machine) -> Plan:
    gpus = machine.gpus
    usual = tuple(n for n in (1, 2, 4, 8) if n <= max(2, gpus or len(os.sched_getaffinity(0))))
    ranks = ranks_of(request, gpus=gpus) if request.ranks else (usual if not gpus or gpus > 1 else (1,))
    mixed = "fp16" if machine.device == "cuda" else "bf16"
    return plan_of(model=request.model, per_rank=request.batch_sizes[0], ranks=ranks, gpus=gpus, mixed=mixed)


def _write(
    request: BenchRequest,
    machine: Machine,
    plan: Plan,
    results: Mapping[Cell, CellResult],
    environment: Mapping[str, Any],
) -> SuiteOutcome:
    found = quantities(plan, results, on_gpus=machine.device == "cuda")
    checked = tuple(check_claim(claim, found) for claim in CLAIMS)
    generated = time.strftime("%Y-%m-%d %H:%M:%S")
    document = {
        "schema": 1,
        "suite": "training",
        "generated": generated,
        "device": machine.device,
        "batch_size_is": "per rank",
        "runs": request.runs,
        "steps": request.steps,
        "environment": environment,
        "claims": [checked_json(one) for one in checked],
        "results": [
            {
                **cell_json(
                    one,
                    model=cell.model or request.model_name,
                    parameters=machine.parameters if not cell.model else None,
                    precision=cell.precision or "fp32",
                ),
                "accumulate": cell.accumulate,
                "data_parallel_gpus": cell.gpus,
            }
            for cell, one in results.items()
        ],
    }
    report = render_suite(
        request=request, generated=generated, device=machine.device, plan=plan, results=results, checked=checked
    )
    files = (
        request.output / f"training_suite_{request.model_name}.json",
        request.output / f"training_suite_{request.model_name}.md",
    )
    files[0].write_text(json.dumps(document, indent=2) + "\n")
    files[1].write_text(report)
    return SuiteOutcome(plan=plan, results=results, checked=checked, document=document, report=report, files=files)
