"""Writes a report into a directory: text and charts of each run, charts of all together, the page, the figures as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.analysis.measure.run_summary import RunSummary, summarize_run
from orchestrator.analysis.measure.windows import cut
from orchestrator.analysis.plots import gpus as gpu_plots
from orchestrator.analysis.plots import runs as run_plots
from orchestrator.analysis.plots.style import PlotError
from orchestrator.analysis.report.as_json import plain
from orchestrator.analysis.report.names import FIGURES, PAGE
from orchestrator.analysis.report.page import page
from orchestrator.analysis.report.text import summary_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orchestrator.analysis.reading.series import Run


@dataclass(slots=True, kw_only=True)
class Report:
    """The written files, in order; ``missing`` gives the reason for each missing chart."""

    directory: Path
    runs: tuple[RunSummary, ...] = ()
    files: list[Path] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def draw(self, caption: str, draw: Callable[[Path], Path], name: str) -> None:
        """Draw a chart; record a failure."""
        try:
            path = draw(self.directory / name)
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

    def to_json(self) -> dict[str, Any]:
        """Return files and figures."""
        return {
            "directory": str(self.directory),
            "files": [str(path) for path in self.files],
            "missing": self.missing,
            "runs": [plain(run) for run in self.runs],
        }


def write_report(runs: Sequence[Run], directory: Path, *, price_per_kwh: float | None = None) -> Report:
    """Write the report of one run or several. Raises OSError when a file cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    report = Report(directory=directory)
    for run, place in zip(runs, places(runs, directory), strict=True):
        place.mkdir(parents=True, exist_ok=True)
        _one(report, run, place, price_per_kwh=price_per_kwh, caption="" if len(runs) == 1 else f"{run.name}: ")
    if any(gpu.times.size for run in runs for gpu in run.gpus):
        _together(report, runs)
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
    report.draw(
        f"{caption}all GPUs over time", lambda to: gpu_plots.write_overview(run, to), str(inside / f"{name}_plot.png")
    )
    report.draw(
        f"{caption}memory of each GPU",
        lambda to: gpu_plots.write_memory_breakdown(run, to),
        str(inside / "per_gpu_memory_breakdown.png"),
    )
    if len(run.gpus) > 1 and windows is not None:
        report.draw(
            f"{caption}load balance",
            lambda to: gpu_plots.write_load_balance(run, windows, to),
            str(inside / "gpu_load_balance_analysis.png"),
        )


def _together(report: Report, runs: Sequence[Run]) -> None:
    report.draw("memory over time", lambda to: run_plots.write_memory_timeline(runs, to), "gpu_memory_timeline.png")
    if len(runs) < 2:
        return
    report.draw("memory", lambda to: run_plots.write_memory_comparison(runs, to), "gpu_memory_comparison.png")
    report.draw(
        "memory while training",
        lambda to: run_plots.write_memory_comparison(runs, to, training=True),
        "training_memory_comparison.png",
    )
    if any(run.progress is not None for run in runs):
        report.draw(
            "memory against accuracy",
            lambda to: run_plots.write_memory_against_accuracy(runs, to),
            "memory_vs_accuracy_scatter.png",
        )
