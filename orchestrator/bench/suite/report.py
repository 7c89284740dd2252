"""training_suite_{model}.md: the document's tables as measured here, and each claim beside the measurement. Values in, Markdown out."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.bench.report import ends, table
from orchestrator.bench.results import MIB, exposed_share
from orchestrator.bench.statistics import Interval, mean_interval, ratio_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.bench.plan import BenchRequest, Cell
    from orchestrator.bench.results import CellResult
    from orchestrator.bench.suite.claims import Checked
    from orchestrator.bench.suite.quantities import Plan


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
    for cell in (plan.single, *plan.data_parallel, *plan.ddp):
        one = usable.get(cell)
        if one is None:
            continue
        mode = "DataParallel" if cell.gpus else "DistributedDataParallel" if cell.ranks > 1 else "one rank"
        several = cell.gpus or cell.ranks
        rate, interval = f"{one.throughput.mean:,.0f}", ends(one.throughput, ",.0f")
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
        shown = "1" if one is single else ends(speed_up, ".2f")
        rows.append((name, f"{one.throughput.mean:,.0f}", f"{speed_up.mean:.2f}x", shown, _memory(one, device)))
    yield from table(("Configuration", "samples/s", "speed-up", "95 % interval", "memory"), rows)


def _scaling(plan: Plan, usable: Mapping[Cell, CellResult]) -> Iterator[str]:
    single = usable.get(plan.single)
    rows = []
    for cell in plan.ddp:
        one = usable.get(cell)
        if one is None or single is None:
            continue
        speed_up = ratio_interval(one.throughputs, single.throughputs)
        efficiency = speed_up.divided(cell.ranks)
        rows.append((str(cell.ranks), f"{speed_up.mean:.2f}x", f"{efficiency.mean:.0%}", ends(efficiency, ".0%")))
    if not rows:
        yield "One rank alone: there is nothing to scale."
        return
    yield from table(("ranks", "speed-up", "efficiency", "95 % interval"), rows)


def _communication(request: BenchRequest, plan: Plan, usable: Mapping[Cell, CellResult]) -> Iterator[str]:
    rows = []
    for cell in (*plan.ddp, *plan.other_models):
        one = usable.get(cell)
        if one is None:
            continue
        share = mean_interval(exposed_share(one))
        hidden = fmean(run.parts.hidden for run in one.runs) * 1e3
        name = cell.model or request.model_name
        rows.append((name, str(cell.ranks), f"{share.mean:.0%}", ends(share, ".0%"), f"{hidden:.3f}"))
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
    return f"{interval.mean:.2f} ({ends(interval, '.2f')}){where}"


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
        "measured": None if one.measured is None else one.measured.interval.mean,
        "interval_95": None if one.measured is None else one.measured.interval.as_json(),
        "measured_on": None if one.measured is None else ("gpus" if one.measured.on_gpus else "processors"),
        "finding": one.finding.value,
        "needs": one.needs or None,
    }
