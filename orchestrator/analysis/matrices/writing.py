"""Writes the results of a matrix into a directory: each job's telemetry, the summary by configuration, and ``graphs``."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from orchestrator import trees
from orchestrator.analysis.matrices.page import matrix_page
from orchestrator.analysis.matrices.plots import by_configuration
from orchestrator.analysis.matrices.search_results import as_cell
from orchestrator.analysis.matrices.summary import REPEATS, Configuration, MatrixRun, Score, configurations
from orchestrator.analysis.measure.run_summary import ACCURACIES
from orchestrator.analysis.plots.runs import (
    write_memory_against_accuracy,
    write_memory_comparison,
    write_memory_timeline,
)
from orchestrator.analysis.plots.style import PlotError
from orchestrator.analysis.report.as_json import plain
from orchestrator.analysis.report.names import PAGE, REPORT
from orchestrator.analysis.report.writing import file_name
from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.matrices.search_results import SearchResult

GRAPHS: Final = "graphs"
COPIED: Final = ("telemetry", "metrics.jsonl", "metrics.jsonl.1", REPORT)
LONGEST_LABEL: Final = 40
MOST_TOGETHER: Final = 12
"""Runs in one picture; more cannot be told apart."""


@dataclass(slots=True, kw_only=True)
class Results:
    """The written files, in order; ``missing`` gives the reason for each missing one."""

    directory: Path
    configurations: tuple[Configuration, ...]
    files: list[Path] = field(default_factory=list)
    pictures: dict[str, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the figures, and the names of the files."""
        return {
            "directory": str(self.directory),
            "configurations": plain(self.configurations),
            "files": [str(path) for path in self.files],
            "missing": list(self.missing),
        }


def write_results(
    runs: Sequence[MatrixRun],
    directory: Path,
    score: Score | None,
    *,
    repeats: Collection[str] = REPEATS,
    search: SearchResult | None = None,
    title: str = "matrix",
) -> Results:
    """Write everything, also of a search; a file of the same name is replaced. Raises OSError."""
    results = Results(directory=directory, configurations=configurations(runs, score, repeats=repeats))
    directory.mkdir(parents=True, exist_ok=True)
    for one in runs:
        _copy(one, results)
    summary = ("" if search is None else search.text()) + summary_text(results.configurations)
    _write(results, "summary.txt", summary)
    _write(results, "summary.json", json.dumps(plain(results.configurations), indent=1) + "\n")
    _write_csv(results)
    graphs = directory / GRAPHS
    graphs.mkdir(exist_ok=True)
    if search is not None:
        _write_search(results, search, graphs)
    for quantity in _quantities(results.configurations):
        _draw(
            results, partial(by_configuration, results.configurations, quantity), graphs / f"{file_name(quantity)}.png"
        )
    _together(results, runs, graphs)
    page = matrix_page(
        f"Report of {title}", results.configurations, results.pictures, search=search, remarks=results.missing
    )
    _write(results, PAGE, page)
    return results


def _write_search(results: Results, search: SearchResult, graphs: Path) -> None:
    for name, write in search.files().items():
        write(results.directory / name)
        results.files.append(results.directory / name)
    for name, draw in search.charts().items():
        _draw(results, draw, graphs / f"{file_name(name)}.png")


def _draw(results: Results, draw: Callable[[Path], Path], target: Path) -> None:
    try:
        path = draw(target)
    except PlotError as error:
        if str(error) not in results.missing:
            results.missing.append(str(error))
        return
    results.files.append(path)
    results.pictures[target.stem.replace("_", " ")] = path


def _together(results: Results, runs: Sequence[MatrixRun], graphs: Path) -> None:
    """Draw pictures with a line or a bar for each run, under the names that `orch report` gives them."""
    sampled = [(one, one.run) for one in runs if one.run is not None and any(gpu.times.size for gpu in one.run.gpus)]
    if not sampled:
        return
    shown = [replace(run, name=f"{_label(one.values)} [{one.job_id}]") for one, run in sampled[:MOST_TOGETHER]]
    if len(shown) < len(sampled):
        results.missing.append(f"pictures of runs side by side show the first {len(shown)} of {len(sampled)}")
    _draw(results, partial(write_memory_timeline, shown), graphs / "gpu_memory_timeline.png")
    _draw(results, partial(write_memory_comparison, shown), graphs / "gpu_memory_comparison.png")
    training = partial(write_memory_comparison, shown, training=True)
    _draw(results, training, graphs / "training_memory_comparison.png")
    if any(run.progress is not None and run.progress.best(*ACCURACIES) for run in shown):
        _draw(results, partial(write_memory_against_accuracy, shown), graphs / "memory_vs_accuracy_scatter.png")


def _label(values: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."


def _quantities(found: Sequence[Configuration]) -> list[str]:
    return list(dict.fromkeys(name for one in found for name in one.quantities))


def _copy(one: MatrixRun, results: Results) -> None:
    """Copy the job's records to a directory of its own."""
    if one.run is None or not one.run.sources:
        results.missing.append(f"{one.job_id} ({one.state}) has recorded nothing")
        return
    source = one.run.sources[0]
    target = results.directory / "runs" / file_name(one.job_id)
    target.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        path = source / name
        if path.is_symlink():  # the job can write there: links are not followed
            continue
        if path.is_dir():
            trees.copy(path, target / name, problems := trees.Problems())
            if problems:
                results.missing.append(f"{one.job_id}: not all of {name} was copied ({problems})")
        elif path.is_file():
            shutil.copyfile(path, target / name, follow_symlinks=False)
    results.files.append(target)


def _write(results: Results, name: str, text: str) -> None:
    path = results.directory / name
    path.write_text(text, encoding="utf-8")
    results.files.append(path)


def _write_csv(results: Results) -> None:
    path = results.directory / "summary.csv"
    parameters = list(dict.fromkeys(name for one in results.configurations for name in one.values))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*parameters, "quantity", "runs", "mean", "std", "minimum", "maximum"])
        for one in results.configurations:
            for quantity, values in one.quantities.items():
                spread = (values.runs, values.mean, "" if values.std is None else values.std)
                row = [*(as_cell(one.values.get(name, "")) for name in parameters), quantity, *spread]
                writer.writerow([*row, values.minimum, values.maximum])
    results.files.append(path)


def summary_text(found: Sequence[Configuration]) -> str:
    """Return the summary for people: each configuration over all its runs."""
    lines = []
    for one in found:
        lines.append(f"{one.label}: {one.ended} of {one.runs} runs succeeded")
        for quantity, values in one.quantities.items():
            spread = "" if values.std is None else f" (±{number(values.std)})"
            extent = (
                ""
                if values.runs == 1
                else f", {number(values.minimum, 6)} to {number(values.maximum, 6)}, {values.runs} runs"
            )
            lines.append(f"  {quantity}: {number(values.mean, 6)}{spread}{extent}")
    return "\n".join(lines) + "\n" if lines else "no run\n"
