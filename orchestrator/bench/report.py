"""comparison_report_{model}.md (single against multi GPU at equal global batch, a step's parts, the environment), and its two graphs.

A ratio is called a speed-up only where its interval excludes 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, TypeVar

from orchestrator.bench.plan import BenchError
from orchestrator.bench.results import MIB, SOURCE_PAYS, compare
from orchestrator.bench.statistics import FEWEST_RUNS, outliers
from orchestrator.gpu.load import known_mean
from orchestrator.parts import install_line
from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.statistics import Interval
    from orchestrator.bench.results import CellResult, Comparison

T = TypeVar("T")
_HOUR: Final = 3600.0
_MILLION: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that a report is about, and how it was measured."""

    model: str
    parameters: int
    precision: str
    device: str
    runs: int
    steps: int
    generated: str
    environment: Mapping[str, Any]
    price_per_gpu_hour: float | None = None


def render_report(subject: Subject, results: Sequence[CellResult]) -> str:
    """Return the whole report."""
    comparisons = compare(results)
    lines = [
        f"# {subject.model} model: single against multi GPU",
        "",
        (
            f"Generated {subject.generated}. {subject.parameters:,} trainable parameters, {subject.precision}, each rank on "
            f"{subject.device}; {plural(subject.runs, 'run')} per row, {subject.steps} timed steps per run, the rows' runs in turn."
        ),
        "",
        (
            "Batch sizes are global: all ranks together. Speed-up compares rows of the same global batch. Intervals are 95 % "
            f"bootstrap intervals of the mean over runs; fewer than {FEWEST_RUNS} runs have none."
        ),
        "",
        "## Summary",
        "",
        *_summary(subject, comparisons),
        "",
        "## All rows",
        "",
        *_rows(subject, results),
        "",
        "## Where a step's time goes",
        "",
        (
            "Compute is a step without communication (DDP's `no_sync`). Exposed communication is what backward waits for after "
            "the last bucket of gradients, hidden communication what runs before that, both from DDP's own hook; exposed "
            "includes waiting for slower ranks. Other is the rest of the step: computation slowed by communication beside it, and noise."
        ),
        "",
        *_parts(results),
        "",
        *_remarks(results),
        "## Environment",
        "",
        *_environment(subject.environment),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def columns(rows: Iterable[T], cells: Mapping[str, Callable[[T], str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: a column for each title, with the cell that a row has there."""
    return table(list(cells), [[cell(row) for cell in cells.values()] for row in rows])


def _summary(subject: Subject, comparisons: Sequence[Comparison]) -> Iterator[str]:
    if not comparisons:
        yield "Nothing to compare: no global batch was measured with one rank and with several."
        return
    yield from columns(
        comparisons,
        {
            "Batch size (global)": lambda one: str(one.multi.cell.batch),
            "per rank": lambda one: str(one.multi.cell.per_rank),
            "ranks": lambda one: str(one.multi.cell.ranks),
            "Single GPU": lambda one: f"{one.single.throughput.value:,.0f}",
            "Multi GPU": lambda one: f"{one.multi.throughput.value:,.0f}",
            "Speed-up": lambda one: _ratio(one.speed_up),
            "Efficiency": lambda one: f"{one.efficiency:.0%}",
            "Recommendation": recommendation,
        },
    )
    mean = fmean(one.speed_up.value for one in comparisons)
    yield ""
    yield f"**Average speed-up**: {mean:.2f}x over {plural(len(comparisons), 'row')} (samples per second)."
    yield ""
    yield f"**Conclusion**: {conclusion(comparisons)}"
    if subject.price_per_gpu_hour is not None:
        yield ""
        yield f"Costs are at {subject.price_per_gpu_hour:g} per GPU and hour."


def recommendation(comparison: Comparison) -> str:
    """Return a row's result: by its interval, and by whether the gain is large enough to report."""
    low = comparison.speed_up.low
    if low is None:
        return f"unclear: fewer than {FEWEST_RUNS} runs"
    if comparison.finding == "faster":
        return "multi-GPU beneficial" if low >= SOURCE_PAYS else "multi-GPU faster, by little"
    if comparison.finding == "slower":
        return "single GPU preferred"
    return "no difference shown"


def conclusion(comparisons: Sequence[Comparison]) -> str:
    """Return the result of all rows together."""
    found = {one.finding for one in comparisons}
    if found == {"faster"}:
        return "more ranks are faster at every batch size measured."
    if found == {"slower"}:
        return "one rank is faster at every batch size measured."
    faster = sorted({one.multi.cell.batch for one in comparisons if one.finding == "faster"})
    if not faster:
        return "these runs show no batch size at which more ranks are faster."
    return f"more ranks are faster at a global batch of {', '.join(map(str, faster))}, and not shown to be elsewhere."


def _ratio(speed_up: Interval) -> str:
    return f"{speed_up.value:.2f}x ({speed_up.ends('.2f', 'no interval')})"


def _rows(subject: Subject, results: Sequence[CellResult]) -> Iterator[str]:
    money = subject.price_per_gpu_hour

    def spent(one: CellResult) -> float:
        return one.cell.ranks * _MILLION / one.throughput.value

    shown: dict[str, Callable[[CellResult], str]] = {
        "Batch size (global)": lambda one: str(one.cell.batch),
        "per rank": lambda one: str(one.cell.per_rank),
        "ranks": lambda one: str(one.cell.ranks),
        "samples/s": lambda one: f"{one.throughput.value:,.0f}",
        "95 % interval": lambda one: one.throughput.ends(",.0f", "unknown"),
        "peak memory MiB": lambda one: f"{max(run.peak_memory_bytes for run in one.runs) / MIB:,.0f}",
        "utilization": lambda one: _known([run.gpu.utilization for run in one.runs], "{:.0%}"),
        "power W": lambda one: _known([run.gpu.power_watts for run in one.runs], "{:,.0f}"),
        "J/sample": lambda one: _known([_joules(r.gpu.power_watts, r.samples_per_second) for r in one.runs], "{:.3g}"),
        "GPU seconds per million samples": lambda one: f"{spent(one):,.1f}",
    }
    if money is not None:
        shown["cost per million samples"] = lambda one: f"{spent(one) / _HOUR * money:.4g}"
    return columns([one for one in results if one.runs], shown)


def _joules(watts: float | None, rate: float) -> float | None:
    """Return joules per sample, by the mean power of the run: its energy includes warm-up and controls."""
    return None if watts is None else watts / rate


def _known(values: Sequence[float | None], form: str) -> str:
    mean = known_mean(values)
    return "unknown" if mean is None else form.format(mean)


def _parts(results: Sequence[CellResult]) -> Iterator[str]:
    def ms(part: str) -> Callable[[CellResult], str]:
        return lambda one: f"{getattr(one.parts, part) * 1e3:.3f}"

    return columns(
        [one for one in results if one.runs],
        {
            "Batch size (global)": lambda one: str(one.cell.batch),
            "ranks": lambda one: str(one.cell.ranks),
            **{f"{part} ms": ms(part) for part in ("compute", "exposed", "hidden", "other")},
            "exposed share": lambda one: f"{one.parts.exposed / fmean(run.step_seconds for run in one.runs):.0%}",
            "buckets": lambda one: str(one.runs[0].buckets),
            "MB reduced": lambda one: f"{one.runs[0].reduced_bytes / 1e6:.3g}",
        },
    )


def _remarks(results: Sequence[CellResult]) -> Iterator[str]:
    found = []
    for one in results:
        name = f"{plural(one.cell.ranks, 'rank')}, global batch {one.cell.batch}"
        if one.error:
            found.append(f"- {name}: failed: {one.error}")
        far = [one.runs[i] for i in outliers(one.throughputs)]
        if far:
            values = ", ".join(f"{run.samples_per_second:,.0f} samples/s in run {run.number}" for run in far)
            found.append(f"- {name}: far from the other runs, and kept: {values}")
        unstable = sum(not run.stable for run in one.runs)
        if unstable:
            found.append(
                f"- {name}: step times were not stable after the longest warm-up in {unstable} of {len(one.runs)} runs"
            )
    if found:
        yield from ("## Remarks", "", *found, "")


def _environment(environment: Mapping[str, Any]) -> Iterator[str]:
    yield f"- {environment['cpus']} processors ({environment['cpu']}), {plural(environment['threads_per_rank'], 'thread')} per rank, {environment['system']}"
    yield f"- load average at the start: {', '.join(f'{value:.1f}' for value in environment['load_average'])}"
    yield "- versions: " + ", ".join(f"{name} {value}" for name, value in environment["versions"].items() if value)
    for gpu in environment["gpus"]:
        clocks = ", ".join(f"{domain} {hertz / 1e6:.0f} MHz" for domain, hertz in gpu.get("clocks_hertz", {}).items())
        yield f"- {gpu['model']}, driver {gpu['driver']}" + (f", {clocks}" if clocks else "")
    for name, value in environment["settings"].items():
        yield f"- {name}={value}"
    if environment["topology"]:
        yield from ("", "```", environment["topology"].rstrip(), "```")


def write_plots(results: Sequence[CellResult], model: str, directory: Path) -> tuple[Path, ...]:
    """Draw both graphs into the directory; return their paths. Raises BenchError without matplotlib or a run."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError("graphs need matplotlib", hint=install_line("plots")) from error
    done = [one for one in results if one.runs]
    if not done:
        raise BenchError("no run ended: there is nothing to draw", hint="the log of each rank says why")
    paths = (directory / f"scaling_{model}.png", directory / f"step_parts_{model}.png")
    for path, draw in zip(paths, (_draw_scaling, _draw_parts), strict=True):
        figure = Figure(figsize=(9, 5), layout="constrained")
        draw(figure.subplots(), done)
        figure.suptitle(model)
        figure.savefig(path, format="png", dpi=110)
    return paths


def _draw_scaling(axes: Any, results: Sequence[CellResult]) -> None:
    for batch in sorted({one.cell.batch for one in results}):
        line = [one for one in results if one.cell.batch == batch]
        means = [one.throughput for one in line]
        below = [0.0 if m.low is None else max(0.0, m.value - m.low) for m in means]
        above = [0.0 if m.high is None else max(0.0, m.high - m.value) for m in means]
        ranks = [one.cell.ranks for one in line]
        axes.errorbar(
            ranks, [m.value for m in means], yerr=[below, above], marker="o", capsize=3, label=f"global batch {batch}"
        )
    axes.set_xlabel("ranks")
    axes.set_xticks(sorted({one.cell.ranks for one in results}))
    axes.set_ylabel("samples/s (95 % interval)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_parts(axes: Any, results: Sequence[CellResult]) -> None:
    names = [f"{one.cell.batch}\n{plural(one.cell.ranks, 'rank')}" for one in results]
    base = [0.0] * len(results)
    for part in ("compute", "exposed", "other"):
        values = [max(0.0, getattr(one.parts, part)) * 1e3 for one in results]
        axes.bar(names, values, bottom=base, label=part if part != "exposed" else "exposed communication")
        base = [low + value for low, value in zip(base, values, strict=True)]
    hidden = [one.parts.hidden * 1e3 for one in results]
    axes.plot(names, hidden, "kx", label="hidden communication (within compute)")
    axes.set_xlabel("global batch")
    axes.set_ylabel("ms per step")
    axes.legend()
    axes.grid(alpha=0.3, axis="y")
