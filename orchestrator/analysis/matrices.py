"""Figures, charts and files about the runs of a matrix: by configuration, over all its runs, and the trials of a search."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from html import escape
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator import trees
from orchestrator.analysis import PAGE, REPORT
from orchestrator.analysis.plots import (
    COLOURS,
    GREY,
    PlotError,
    colour,
    finish,
    grid_of,
    new_figure,
    save,
)
from orchestrator.analysis.report import Written, document, file_name, html_table, plain, shown
from orchestrator.analysis.run_summary import ACCURACIES, summarize_run
from orchestrator.units import number, spreadsheet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from orchestrator.analysis.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """A trial: its values, and its result for each objective; no results where it was pruned or has failed."""

    number: int
    job_id: str
    state: str
    values: Mapping[str, Any]
    given: Mapping[str, float] = field(default_factory=dict)
    pruned: bool = False
    is_best: bool = False


REPEATS: Final = frozenset({"seed", "random_seed", "repeat", "repetition", "trial", "run"})
"""Parameters that distinguish runs of one configuration, not configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRun:
    """One job of a matrix: its values, its state, and its record if there is one."""

    job_id: str
    state: str
    values: Mapping[str, Any]
    run: Run | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The metric that rates runs."""

    name: str
    highest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A quantity over several runs. ``std`` is that of a sample; None with one run."""

    runs: int
    mean: float
    std: float | None
    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The runs with the same values, repeats included. ``ended`` of the ``runs`` have succeeded, and only they are measured."""

    values: Mapping[str, Any]
    runs: int
    ended: int
    quantities: Mapping[str, Spread] = field(default_factory=dict)
    job_ids: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The values in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items()) or "all runs"


def figures_of(run: Run, score: Score | None) -> dict[str, float]:
    """Return the compared figures of a run: the best and the last score, time, speed, memory, energy."""
    summary = summarize_run(run)
    speed = summary.speed
    found: dict[str, float | None] = {}
    if score is not None and run.progress is not None:
        found |= _scores(run.progress.metrics.get(score.name), score)
    found["seconds"] = _length(run)
    found["step_seconds"] = None if speed is None or speed.step_seconds is None else speed.step_seconds.value
    found["samples_per_second"] = None if speed is None else speed.samples_per_second
    found["memory_mib"] = summary.memory_mib
    found["energy_joules"] = summary.energy_joules
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _scores(values: Any, score: Score) -> dict[str, float | None]:
    there = np.empty(0) if values is None else values[np.isfinite(values)]
    if not len(there):
        return {}
    best = there.max() if score.highest else there.min()
    return {f"{score.name} (best)": float(best), f"{score.name} (last)": float(there[-1])}


def _length(run: Run) -> float | None:
    if run.progress is not None and len(run.progress.times) > 1:
        return float(run.progress.times[-1] - run.progress.times[0])
    return run.seconds or None


def configurations(
    runs: Sequence[MatrixRun], score: Score | None, *, repeats: Collection[str] = REPEATS
) -> tuple[Configuration, ...]:
    """Return the configurations by the mean of the score, the best first; without a score in their own order."""
    groups: dict[tuple[tuple[str, Any], ...], list[MatrixRun]] = {}
    for run in runs:
        key = tuple((name, value) for name, value in run.values.items() if name not in repeats)
        groups.setdefault(_typed(key), []).append(run)
    found = [_configuration(group, score, repeats) for group in groups.values()]
    if score is None:
        return tuple(found)
    name = f"{score.name} (best)"
    sign = -1.0 if score.highest else 1.0
    return tuple(sorted(found, key=lambda c: sign * c.quantities[name].mean if name in c.quantities else math.inf))


def _typed(key: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Return a key that distinguishes True from 1."""
    return tuple((name, (type(value) is bool, value)) for name, value in key)


def _configuration(group: Sequence[MatrixRun], score: Score | None, repeats: Collection[str]) -> Configuration:
    measured = [figures_of(one.run, score) for one in group if one.state == "SUCCEEDED" and one.run is not None]
    names = list(dict.fromkeys(name for figures in measured for name in figures))
    return Configuration(
        values={name: value for name, value in group[0].values.items() if name not in repeats},
        runs=len(group),
        ended=sum(one.state == "SUCCEEDED" for one in group),
        quantities={name: spread([figures[name] for figures in measured if name in figures]) for name in names},
        job_ids=tuple(one.job_id for one in group),
    )


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    array = np.array(values, dtype=float)
    return Spread(
        runs=len(array),
        mean=float(array.mean()),
        std=float(array.std(ddof=1)) if len(array) > 1 else None,
        minimum=float(array.min()),
        maximum=float(array.max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The trials of a search in order, and its objectives: `min` or `max` by name."""

    objectives: Mapping[str, str]
    trials: Sequence[TrialResult]

    def files(self) -> dict[str, Callable[[Path], None]]:
        """Return the function that writes each file, by the file's name."""
        return {"trials.csv": self._write_csv, "search.json": self._write_json}

    def charts(self) -> dict[str, Callable[[Path], Path]]:
        """Return the function that draws each chart, by name: ``objective_`` and the objective, or ``pareto_front``."""
        found: dict[str, Callable[[Path], Path]] = {}
        if len(self.objectives) > 1:
            found["pareto_front"] = partial(write_front, self.trials, self.objectives)
        for name, order in self.objectives.items():
            found[f"objective_{name}"] = partial(write_history, self.trials, name, order)
        return found

    def text(self) -> str:
        """Return a line for each best trial, and one with the numbers of trials."""
        best = [trial for trial in self.trials if trial.is_best]
        lines = []
        for trial in sorted(best, key=lambda trial: next(iter(trial.given.values()))):
            given = ", ".join(f"{name}={number(value, 6)}" for name, value in trial.given.items())
            values = ", ".join(f"{name}={value}" for name, value in trial.values.items())
            lines.append(f"best trial {trial.number} ({trial.job_id}): {given} with {values}")
        pruned = sum(trial.pruned for trial in self.trials)
        lines.append(f"trials: {len(self.trials)}, of which pruned: {pruned}")
        return "\n".join(lines) + "\n"

    def _write_json(self, target: Path) -> None:
        body = {"objectives": dict(self.objectives), "trials": [asdict(trial) for trial in self.trials]}
        target.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    def _write_csv(self, target: Path) -> None:
        parameters = list(dict.fromkeys(name for trial in self.trials for name in trial.values))
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["trial", "job", "state", *parameters, *self.objectives, "best"])
            for trial in self.trials:
                values = [spreadsheet(trial.values.get(name, "")) for name in parameters]
                given = [trial.given.get(name, "") for name in self.objectives]
                state = "PRUNED" if trial.pruned else trial.state
                writer.writerow([trial.number, trial.job_id, state, *values, *given, int(trial.is_best)])


def matrix_page(
    title: str,
    found: Sequence[Configuration],
    pictures: Mapping[str, Path],
    *,
    search: SearchResult | None = None,
    remarks: Iterable[str] = (),
) -> str:
    """Return the page, which loads nothing from elsewhere. Raises OSError when a picture cannot be read."""
    body = [f"<h1>{escape(title)}</h1>", *(f'<p class="note">{escape(text)}</p>' for text in remarks)]
    if search is not None:
        body += _trials(search)
    return document(title, [*body, *_configurations(found), *shown(pictures)])


def _trials(search: SearchResult) -> list[str]:
    """Return tables with a row for each trial, first the trials that no other one beats in all objectives."""
    names = list(dict.fromkeys(name for trial in search.trials for name in trial.values))
    head = ["trial", "job", "state", *names, *(f"{name} ({order})" for name, order in search.objectives.items())]
    best = [trial for trial in search.trials if trial.is_best]
    others = [trial for trial in search.trials if not trial.is_best]
    title = "Pareto front" if len(search.objectives) > 1 else "Best trial"
    parts = [f"<h2>{title}</h2>", html_table(head, [_trial(trial, names, search) for trial in best])]
    if others:
        parts += ["<h2>Other trials</h2>", html_table(head, [_trial(trial, names, search) for trial in others])]
    return parts


def _trial(trial: TrialResult, names: Sequence[str], search: SearchResult) -> list[str]:
    given = [number(trial.given[name], 6) if name in trial.given else "" for name in search.objectives]
    values = [str(trial.values.get(name, "")) for name in names]
    return [str(trial.number), trial.job_id, "PRUNED" if trial.pruned else trial.state, *values, *given]


def _configurations(found: Sequence[Configuration]) -> list[str]:
    quantities = list(dict.fromkeys(name for one in found for name in one.quantities))
    rows = []
    for one in found:
        cells = []
        for name in quantities:
            values = one.quantities.get(name)
            spread = "" if values is None or values.std is None else f" (±{number(values.std)})"
            cells.append("" if values is None else f"{number(values.mean, 6)}{spread}")
        rows.append([one.label, f"{one.ended} of {one.runs}", *cells])
    return ["<h2>Configurations</h2>", html_table(["configuration", "runs that succeeded", *quantities], rows)]


GRAPHS: Final = "graphs"
COPIED: Final = ("telemetry", "metrics.jsonl", "metrics.jsonl.1", REPORT)
LONGEST_LABEL: Final = 40
MAX_TOGETHER: Final = 12
"""Runs in one picture; more cannot be told apart."""


@dataclass(slots=True, kw_only=True)
class Results(Written):
    """The written results of a matrix."""

    configurations: tuple[Configuration, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures, and the names of the files."""
        return {**Written.to_json(self), "configurations": plain(self.configurations)}


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
    results.write("summary.txt", summary)
    results.write("summary.json", json.dumps(plain(results.configurations), indent=1) + "\n")
    _write_csv(results)
    (directory / GRAPHS).mkdir(exist_ok=True)
    if search is not None:
        for name, write in search.files().items():
            write(directory / name)
            results.files.append(directory / name)
        for name, draw in search.charts().items():
            results.draw(name.replace("_", " "), draw, name=f"{GRAPHS}/{file_name(name)}.png")
    for quantity in dict.fromkeys(name for one in results.configurations for name in one.quantities):
        name = f"{GRAPHS}/{file_name(quantity)}.png"
        results.draw(quantity.replace("_", " "), by_configuration, results.configurations, quantity, name=name)
    _together(results, runs)
    page = matrix_page(
        f"Report of {title}", results.configurations, results.pictures, search=search, remarks=results.missing
    )
    results.write(PAGE, page)
    return results


def _together(results: Results, runs: Sequence[MatrixRun]) -> None:
    sampled = [(one, one.run) for one in runs if one.run is not None and any(gpu.times.size for gpu in one.run.gpus)]
    if not sampled:
        return
    shown = [replace(run, name=f"{_label(one.values)} [{one.job_id}]") for one, run in sampled[:MAX_TOGETHER]]
    if len(shown) < len(sampled):
        results.missing.append(f"pictures of runs side by side show the first {len(shown)} of {len(sampled)}")
    accuracy = any(run.progress is not None and run.progress.best(*ACCURACIES) for run in shown)
    results.draw_side_by_side(shown, f"{GRAPHS}/", accuracy=accuracy)


def _label(values: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."


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


def _write_csv(results: Results) -> None:
    path = results.directory / "summary.csv"
    parameters = list(dict.fromkeys(name for one in results.configurations for name in one.values))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*parameters, "quantity", "runs", "mean", "std", "minimum", "maximum"])
        for one in results.configurations:
            for quantity, values in one.quantities.items():
                spread = (values.runs, values.mean, "" if values.std is None else values.std)
                row = [*(spreadsheet(one.values.get(name, "")) for name in parameters), quantity, *spread]
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


UNITS: Final = {
    "seconds": "time from the first report to the last (s)",
    "step_seconds": "time of a step (s)",
    "samples_per_second": "samples per second",
    "memory_mib": "memory of all GPUs, mean (MiB)",
    "energy_joules": "energy (J)",
}
MAX_SHOWN: Final = 40
_LABEL = 60


def by_configuration(found: Sequence[Configuration], quantity: str, target: Path) -> Path:
    """Draw the mean, the range and the standard deviation of a quantity; the configurations from the top down in their order."""
    shown = [one for one in found if quantity in one.quantities][:MAX_SHOWN]
    if not shown:
        raise PlotError(f"no run has reported {quantity}")
    figure = new_figure(8.0, max(2.2, 0.6 + 0.4 * len(shown)))
    axis = figure.subplots()
    for place, one in enumerate(shown):
        values = one.quantities[quantity]
        axis.plot([values.minimum, values.maximum], [place, place], color=GREY, linewidth=1, zorder=1)
        axis.errorbar(
            values.mean, place, xerr=values.std or 0.0, fmt="o", color=colour(0), capsize=4, linewidth=2, zorder=2
        )
    labels = [f"{_short(one.label)} (n={one.quantities[quantity].runs})" for one in shown]
    axis.set_yticks(range(len(shown)), labels=labels)
    axis.set_ylim(len(shown) - 0.5, -0.5)
    finish(axis, y="", x=UNITS.get(quantity, quantity), from_zero=False)
    axis.set_title("mean and standard deviation; the thin line is the range of all runs", fontsize="small", loc="left")
    return save(figure, target)


def _short(label: str) -> str:
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 3]}..."


_MAX_NUMBERS: Final = 40


def write_history(trials: Sequence[TrialResult], name: str, order: str, target: Path) -> Path:
    """Draw an objective by trial, the best so far as a line, and the pruned trials. Raises PlotError."""
    given = [trial for trial in trials if name in trial.given]
    if not given:
        raise PlotError(f"no trial has given {name}")
    figure = new_figure(9, 4.5)
    panel = figure.subplots()
    choose = max if order == "max" else min
    best: list[float] = []
    for trial in given:
        best.append(choose([*best[-1:], trial.given[name]]))
    panel.step([trial.number for trial in given], best, where="post", color=COLOURS[1], label=f"best so far ({order})")
    panel.plot(
        [trial.number for trial in given],
        [trial.given[name] for trial in given],
        linestyle="",
        marker="o",
        color=COLOURS[0],
        label="trial",
    )
    _mark_pruned(panel, trials)
    panel.legend(fontsize="small", framealpha=0.9, loc="best")
    finish(panel, x="trial", y=UNITS.get(name, name), title=f"{name} of each trial", from_zero=False)
    return save(figure, target)


def _mark_pruned(panel: Any, trials: Sequence[TrialResult]) -> None:
    pruned = [trial.number for trial in trials if trial.pruned]
    if pruned:
        low, _ = panel.get_ylim()
        panel.plot(pruned, [low] * len(pruned), linestyle="", marker="x", color=GREY, label="pruned", clip_on=False)


def write_front(trials: Sequence[TrialResult], objectives: Mapping[str, str], target: Path) -> Path:
    """Draw each pair of objectives, with a front of the trials that no other beats in all. Raises PlotError."""
    given = [trial for trial in trials if all(name in trial.given for name in objectives)]
    pairs = list(combinations(objectives, 2))
    if not given or not pairs:
        raise PlotError("no trial has given several objectives")
    rows, columns = grid_of(len(pairs))
    figure = new_figure(max(7.5, 5.5 * columns), 4.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, pair in zip(panels, pairs, strict=False):
        _front_panel(panel, given, pair, objectives)
    for panel in panels[len(pairs) :]:
        panel.set_visible(False)
    return save(figure, target)


def _front_panel(
    panel: Any, given: Sequence[TrialResult], pair: tuple[str, str], objectives: Mapping[str, str]
) -> None:
    across, up = pair
    front = sorted((trial for trial in given if trial.is_best), key=lambda trial: trial.given[across])
    others = [trial for trial in given if not trial.is_best]
    for chosen, style in (
        (others, {"marker": "o", "color": GREY, "label": "beaten by another trial"}),
        (front, {"marker": "D", "color": COLOURS[0], "label": "Pareto front"}),
    ):
        if chosen:
            points = [trial.given[across] for trial in chosen], [trial.given[up] for trial in chosen]
            panel.plot(*points, linestyle="", **style)
    if len(objectives) == 2:
        panel.step(
            [trial.given[across] for trial in front],
            [trial.given[up] for trial in front],
            where="post" if objectives[across] == "min" else "pre",
            color=COLOURS[0],
            linewidth=1,
        )
    for trial in front[:_MAX_NUMBERS]:
        point = (trial.given[across], trial.given[up])
        panel.annotate(str(trial.number), point, textcoords="offset points", xytext=(6, 4), fontsize="small")
    panel.margins(0.12)
    panel.legend(fontsize="small", framealpha=0.9, loc="best")
    better = " and ".join(f"{'less' if objectives[name] == 'min' else 'more'} {name}" for name in pair)
    finish(panel, x=UNITS.get(across, across), y=UNITS.get(up, up), title=f"Better: {better}", from_zero=False)
