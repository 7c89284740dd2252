"""Writes a report into a directory: text and charts of each run, charts of all together, one HTML page, the figures as JSON.

MB in the text are 2**20 bytes, as in the files of gputop and related tools, whose users compare the texts. The page loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from orchestrator.analysis import FIGURES, PAGE
from orchestrator.analysis.plots import (
    PlotError,
    write_load_balance,
    write_memory_against_accuracy,
    write_memory_breakdown,
    write_memory_comparison,
    write_memory_timeline,
    write_overview,
)
from orchestrator.analysis.run_summary import JOULES_PER_KWH, RunSummary, cut, summarize_run
from orchestrator.analysis.runs import SHOWN, Quantity
from orchestrator.units import number, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.run_summary import BalanceAndSpeed, GpuSummary, RunSummary, Speed
    from orchestrator.analysis.runs import Run
    from orchestrator.analysis.statistics import Interval
    from orchestrator.gpu.load import Spread


def plain(value: Any) -> Any:
    """Return a record as JSON values: objects by field name, lists, and null for a number that is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


TITLE: Final = "GPU Performance Summary"


def summary_text(run: RunSummary) -> str:
    """Return the content of ``NAME_summary.txt``."""
    lines = [TITLE, "=" * len(TITLE), "", *_head(run), ""]
    for gpu in run.gpus:
        lines += [*_gpu(gpu), ""]
    breakdown = list(_breakdown(run))
    if breakdown:
        lines += [f"{run.name} - Per-GPU Breakdown:", *(f"    {line}" for line in breakdown), ""]
    lines += [f"{name}: {text}" for name, text in figures(run)]
    return "\n".join(lines) + "\n"


def _head(run: RunSummary) -> Iterator[str]:
    yield f"Run: {run.name}"
    yield f"Duration: {run.seconds:.1f} s"
    yield f"Start: {moment(run.start)}"
    yield f"End: {moment(run.end)}"
    yield f"Readings: {run.samples} of {plural(len(run.gpus), 'GPU')}"
    for note in notes(run):
        yield f"Note: {note}"


def notes(run: RunSummary) -> Iterator[str]:
    """Return notes about the files, to read before their figures are used."""
    if run.repaired:
        yield "the end of the file is cut off; the complete entries before it are used"
    if run.dropped:
        yield f"{plural(run.dropped, 'entry', 'entries')} could not be read and {'is' if run.dropped == 1 else 'are'} left out"
    if not run.gpus:
        yield "no GPU was sampled"


def moment(at: float | None) -> str:
    """Return the local time to the second."""
    return "unknown" if at is None else dt.datetime.fromtimestamp(at).isoformat(sep=" ", timespec="seconds")  # noqa: DTZ006 - of the reader's clock


def _gpu(gpu: GpuSummary) -> Iterator[str]:
    yield f"{gpu.label}: {gpu.model or 'unknown model'}" + (f" ({gpu.uuid})" if gpu.uuid else "")
    yield f"Duration: {gpu.seconds:.1f} s, {plural(gpu.samples, 'reading')}"
    for quantity, found in gpu.quantities.items():
        shown = SHOWN[quantity]
        name = f"{shown.name[0].upper()}{shown.name[1:]} ({shown.unit})"
        yield f"{name}: average {found.mean:.1f}, max {found.maximum:.1f}, min {found.minimum:.1f}"
    if gpu.energy_joules is not None:
        yield f"Energy (J): {gpu.energy_joules:.1f} by {'the counter' if gpu.energy_counted else 'integrating power'}"
    if gpu.throttled_samples:
        yield f"Throttled: in {plural(gpu.throttled_samples, 'reading')}"


def _breakdown(run: RunSummary) -> Iterator[str]:
    having = [(gpu.label, gpu.quantities[Quantity.MEMORY]) for gpu in run.gpus if Quantity.MEMORY in gpu.quantities]
    for label, memory in having:
        yield f"{label}: {memory.mean:.1f} MB (±{memory.std:.1f})"
    if having:
        yield f"Total:  {sum(memory.mean for _, memory in having):.1f} MB"
    for spread in sorted(run.balance.spreads, key=lambda one: one.quantity != "memory"):
        yield balance_line(spread)


def balance_line(spread: Spread) -> str:
    """Return ``Balance: CV = 0.3% (Excellent)``; quantities other than memory with their name."""
    name = "Balance" if spread.quantity == "memory" else f"Balance of {spread.quantity}"
    least = "" if spread.min_per_median is None else f", least/median {spread.min_per_median:.2f}"
    return f"{name}: CV = {100 * spread.cv:.1f}% ({spread.band.capitalize()}){least if name != 'Balance' else ''}"


def figures(run: RunSummary) -> Iterator[tuple[str, str]]:
    """Return (name, text) of every known figure of the run as a whole."""
    if run.power_watts is not None:
        yield "Power", f"{run.power_watts:.1f} W on average, all GPUs together"
    if run.energy_joules is not None:
        counted = sum(gpu.energy_counted for gpu in run.gpus)
        how = (
            "by the counters"
            if counted == len(run.gpus)
            else "by integrating power"
            if not counted
            else "by counters and power"
        )
        yield "Energy", f"{energy(run.energy_joules)} {how}"
    if run.cost is not None:
        yield "Cost of the energy", number(run.cost)
    for phase, joules in run.energy_by_phase.items():
        yield f"Energy, {phase}", f"{energy(joules)} ({100 * joules / (run.energy_joules or joules):.1f} %)"
    if run.speed is not None:
        yield from _speed(run.speed)
    if len(run.gpus) > 1:
        yield "Balance and speed", relation_text(run.relation)
    if run.fragmentation is not None:
        found = run.fragmentation
        yield (
            "Memory reserved and not handed out",
            (
                f"{100 * found.mean_ratio:.1f} % on average, {100 * found.last_ratio:.1f} % at the end,"
                f" {100 * found.change_per_hour:+.1f} percentage points an hour"
            ),
        )


def energy(joules: float) -> str:
    """Return joules, with kilowatt-hours for large values."""
    return f"{joules:.1f} J" + (f" ({joules / JOULES_PER_KWH:.3f} kWh)" if joules > JOULES_PER_KWH / 100 else "")


def _speed(speed: Speed) -> Iterator[tuple[str, str]]:
    yield "Steps", f"{speed.steps} in {plural(speed.attempts, 'attempt')}"
    if speed.step_seconds is not None:
        yield "Step time", with_bounds(speed.step_seconds, factor=1e3, unit="ms")
    for name, value, unit in (
        ("Samples", speed.samples_per_second, "samples/s"),
        ("Tokens", speed.tokens_per_second, "tokens/s"),
        ("Energy of a sample", speed.joules_per_sample, "J/sample"),
    ):
        if value is not None:
            yield name, f"{number(value)} {unit}"
    if speed.last_loss is not None:
        yield "Last loss", number(speed.last_loss)
    if speed.best_accuracy is not None:
        yield f"Best {speed.best_accuracy[0]}", number(speed.best_accuracy[1])


def with_bounds(interval: Interval, *, factor: float = 1.0, unit: str = "") -> str:
    """Return a figure with its bounds, where there are any: 12.3 ms (95 %: 12.1 to 12.5)."""
    text = f"{number(factor * interval.value)} {unit}".rstrip()
    if interval.low is None or interval.high is None:
        return f"{text} (too few readings for an interval)"
    low, high = sorted((factor * interval.low, factor * interval.high))
    return f"{text} ({100 * interval.confidence:.0f} %: {number(low)} to {number(high)})"


def relation_text(relation: BalanceAndSpeed | None) -> str:
    """Return a sentence about the gain of an even load, or that these data show no relation."""
    if relation is None:
        return "not related: too few windows of time have both a CV and step times, or neither changed"
    gain, of = relation.gain, f"{relation.windows} windows, CV of {relation.quantity}"
    if gain.low is None or gain.high is None:
        return f"these data are too short to say whether an uneven load cost speed ({of})"
    bounds = f"{100 * gain.low:.1f} to {100 * gain.high:.1f} %"
    if gain.low > 0.0:
        return f"steps were slower while the load was uneven; an even load would have saved about {100 * gain.value:.1f} % of a step ({bounds}; {of})"
    if gain.high < 0.0:
        return f"steps were faster while the load was uneven ({of}): something else drives both"
    return f"these data do not show that an uneven load cost speed ({bounds} of a step; {of})"


STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top } td.n, th.n { text-align: right }
thead th { border-bottom: 1px solid #999 } figure { margin: 1.2rem 0 } img { max-width: 100%; height: auto }
figcaption, .note { color: #444 } .scroll { overflow-x: auto } .bad { color: #a00; font-weight: 600 }
"""


def page(title: str, runs: Sequence[RunSummary], pictures: Mapping[str, Path], *, remarks: Iterable[str] = ()) -> str:
    """Return the page; ``pictures`` are PNG files by their caption. Raises OSError when one cannot be read."""
    body = [f"<h1>{escape(title)}</h1>", *(f'<p class="note">{escape(text)}</p>' for text in remarks)]
    for run in runs:
        body += _run(run)
    return document(title, [*body, *shown(pictures)])


def shown(pictures: Mapping[str, Path]) -> list[str]:
    """Return PNG files by their caption as embedded HTML. Raises OSError when one cannot be read."""
    body = ["<h2>Pictures</h2>"] if pictures else []
    for caption, path in pictures.items():
        data = base64.b64encode(path.read_bytes()).decode()
        body.append(
            f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{escape(caption)} ({escape(path.name)})</figcaption></figure>"
        )
    return body


def document(title: str, body: Iterable[str]) -> str:
    """Return a page of this HTML that loads nothing."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts, in a box that scrolls sideways."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _run(run: RunSummary) -> list[str]:
    facts = [
        ("Start", moment(run.start)),
        ("End", moment(run.end)),
        ("Duration", f"{run.seconds:,.1f} s"),
        ("Readings", f"{run.samples:,} of {plural(len(run.gpus), 'GPU')}"),
        *(("Note", note) for note in notes(run)),
        *figures(run),
        *(("Load balance", balance_line(spread)) for spread in run.balance.spreads),
    ]
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
    return [f"<h2>{escape(run.name)}</h2>", f"<table>{rows}</table>", _gpus(run)]


def _gpus(run: RunSummary) -> str:
    """Return a table with a row for each GPU: mean and range of each quantity that any of them has."""
    quantities = [quantity for quantity in SHOWN if any(quantity in gpu.quantities for gpu in run.gpus)]
    if not quantities:
        return ""
    head = "".join(f'<th class="n">{SHOWN[one].name} ({SHOWN[one].unit})</th>' for one in quantities)
    rows = []
    for gpu in run.gpus:
        cells = []
        for quantity in quantities:
            found = gpu.quantities.get(quantity)
            text = "" if found is None else f"{found.mean:,.1f} ({found.minimum:,.0f} to {found.maximum:,.0f})"
            cells.append(f'<td class="n">{text}</td>')
        joules = "" if gpu.energy_joules is None else f"{gpu.energy_joules:,.0f}"
        rows.append(
            f"<tr><td>{escape(gpu.label)}</td><td>{escape(gpu.model)}</td>{''.join(cells)}<td class='n'>{joules}</td></tr>"
        )
    return (
        '<div class="scroll"><table><thead><tr><th>GPU</th><th>model</th>'
        f'{head}<th class="n">energy (J)</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="note">Mean over time, and the lowest and the highest reading.</p>'
    )


@dataclass(slots=True, kw_only=True)
class Written:
    """The files that were written into a directory, in order; ``missing`` gives the reason for each missing one."""

    directory: Path
    files: list[Path] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def draw(self, caption: str, draw: Callable[..., Path], *arguments: Any, name: str, **more: Any) -> None:
        """Draw a chart by a function that takes the chart's path last; record a failure."""
        try:
            path = draw(*arguments, self.directory / name, **more)
        except PlotError as error:
            if str(error) not in self.missing:
                self.missing.append(str(error))
            return
        self.pictures[caption] = path
        self.files.append(path)

    def write(self, name: str, text: str) -> None:
        """Write a text file."""
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        self.files.append(path)

    def draw_side_by_side(self, runs: Sequence[Run], folder: str = "", *, accuracy: bool) -> None:
        """Draw pictures with a line or a bar for each run."""
        self.draw("memory over time", write_memory_timeline, runs, name=f"{folder}gpu_memory_timeline.png")
        self.draw("memory", write_memory_comparison, runs, name=f"{folder}gpu_memory_comparison.png")
        while_training = f"{folder}training_memory_comparison.png"
        self.draw("memory while training", write_memory_comparison, runs, name=while_training, training=True)
        if accuracy:
            name = f"{folder}memory_vs_accuracy_scatter.png"
            self.draw("memory against accuracy", write_memory_against_accuracy, runs, name=name)

    def to_json(self) -> dict[str, Any]:
        """Return the names of the files."""
        files = [str(path) for path in self.files]
        return {"directory": str(self.directory), "files": files, "missing": list(self.missing)}


@dataclass(slots=True, kw_only=True)
class Report(Written):
    """The report of one run or several."""

    runs: tuple[RunSummary, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return files and figures."""
        return {**Written.to_json(self), "runs": [plain(run) for run in self.runs]}


def write_report(runs: Sequence[Run], directory: Path, *, price_per_kwh: float | None = None) -> Report:
    """Write the report of one run or several. Raises OSError when a file cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    report = Report(directory=directory)
    for run, place in zip(runs, places(runs, directory), strict=True):
        place.mkdir(parents=True, exist_ok=True)
        _one(report, run, place, price_per_kwh=price_per_kwh, caption="" if len(runs) == 1 else f"{run.name}: ")
    if any(gpu.times.size for run in runs for gpu in run.gpus):
        if len(runs) > 1:
            report.draw_side_by_side(runs, accuracy=any(run.progress is not None for run in runs))
        else:
            report.draw("memory over time", write_memory_timeline, runs, name="gpu_memory_timeline.png")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    report.write(PAGE, page(f"Report of {title}", report.runs, report.pictures, remarks=report.missing))
    report.write(FIGURES, json.dumps([plain(run) for run in report.runs], indent=1) + "\n")
    return report


def places(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Return the directory of each run's own files: the directory itself, or a folder for each of several runs."""
    if len(runs) == 1:
        return [directory]
    return [directory / f"{number}-{file_name(run.name)}" for number, run in enumerate(runs, 1)]


def file_name(name: str) -> str:
    """Return a run's name as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).lstrip(".")[:120] or "run"


def _one(report: Report, run: Run, place: Path, *, price_per_kwh: float | None, caption: str) -> None:
    windows = cut(run)
    summary = summarize_run(run, windows=windows, price_per_kwh=price_per_kwh)
    report.runs = (*report.runs, summary)
    inside = place.relative_to(report.directory)
    name = file_name(run.name)
    report.write(str(inside / f"{name}_summary.txt"), summary_text(summary))
    if not any(gpu.times.size for gpu in run.gpus):
        report.missing.append(f"{run.name}: no GPU was sampled, so there are no pictures of GPUs")
        return
    report.draw(f"{caption}all GPUs over time", write_overview, run, name=str(inside / f"{name}_plot.png"))
    memory = str(inside / "per_gpu_memory_breakdown.png")
    report.draw(f"{caption}memory of each GPU", write_memory_breakdown, run, name=memory)
    if len(run.gpus) > 1 and windows is not None:
        balance = str(inside / "gpu_load_balance_analysis.png")
        report.draw(f"{caption}load balance", write_load_balance, run, windows, name=balance)
