"""Advises one search with Optuna in its own process: ``python -m orchestrator.analysis.search``.

The first line of its input describes the space, each further one all trials so far; each answer is one line: values to try, trials to end
early, results. Jobs wrote the records that it reads, and Optuna takes a second to import: neither belongs in the daemon. It ends at the end
of its input. Nothing is kept between calls: the jobs of the matrix are the study. A daemon that was killed therefore continues with exactly
what the store has, and there is no second record that could differ from it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from orchestrator.analysis.matrices import figures_of
from orchestrator.analysis.runs import SourceError, read_progress, read_run
from orchestrator.spec.matrix import MEASURED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TextIO

    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

    from orchestrator.analysis.runs import Floats, Progress

_GROWTH = 1.1


def objectives_given(directory: Path, names: Iterable[str]) -> tuple[tuple[float, ...] | None, str]:
    """Return the objectives of an ended trial; None, and a text about the missing one, where they are not complete.

    The last reported value of a metric counts: the state in which the trial ended.
    """
    try:
        run = read_run(directory)
    except SourceError:
        return None, "it has recorded nothing"
    measured = figures_of(run, None)
    found = []
    for name in names:
        value = measured.get(name) if name in MEASURED else _last(run.progress, name)
        if value is None:
            return None, f"{name} was not {'measured' if name in MEASURED else 'reported'}"
        if not np.isfinite(value):
            return None, f"{name} ended as {value}"
        found.append(float(value))
    return tuple(found), ""


def _last(progress: Progress | None, name: str) -> float | None:
    values = None if progress is None else progress.metrics.get(name)
    return float(values[-1]) if values is not None and len(values) else None


def reported_by_step(directory: Path, name: str, order: str, *, running: bool) -> dict[int, float]:
    """Return a metric at shared steps; empty where there is none.

    Between two reports it is interpolated; for a running trial it is the better of both (`order` is `min` or `max`).
    """
    progress = read_progress(directory / "metrics.jsonl")
    values = None if progress is None else progress.metrics.get(name)
    if progress is None or values is None:
        return {}
    first = int(np.argmax(np.isfinite(values))) if np.isfinite(values).any() else 0
    return at_shared_steps(progress.steps[first:], values[first:], better=order if running else None)


def at_shared_steps(
    steps: Floats | Sequence[float], values: Floats | Sequence[float], *, better: str | None = None
) -> dict[int, float]:
    """Return the values at the steps of a fixed grid that the reports enclose: interpolated, or the better of both reports.

    Reports are made by time, so two trials hardly ever report the same step, and a pruner compares equal steps only. A loss
    falls fast and then slowly: a line between distant reports lies above it, and would end a trial only because its reports lie
    further from the step than those of others. For steps that were trained again after a restart, the later report counts.
    """
    newest = dict(zip((int(step) for step in steps), (float(value) for value in values), strict=True))
    if not newest:
        return {}
    known = np.array(sorted(newest))
    reports = np.array([newest[step] for step in sorted(newest)])
    grid = np.array([step for step in shared_steps(int(known[-1])) if step >= known[0]])
    if better is None:
        found = np.interp(grid, known, reports)
    else:
        of_both = np.maximum if better == "max" else np.minimum
        after = np.searchsorted(known, grid)
        before = np.where(known[after] == grid, after, after - 1)
        found = of_both(reports[before], reports[after])  # NaN if one of them is NaN
    return dict(zip(grid.tolist(), found.tolist(), strict=True))


def shared_steps(last: int) -> list[int]:
    """Return the steps at which trials are compared: each one at first, later a tenth apart."""
    found, step = [], 1
    while step <= last:
        found.append(step)
        step = max(step + 1, int(step * _GROWTH))
    return found


State = Literal["running", "complete", "pruned", "failed"]
_STATES = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a parameter, included; two whole numbers allow whole numbers only."""

    low: int | float
    high: int | float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Parameters to search, with lists or bounds, and the objectives (`min` or `max`) by name."""

    name: str
    objectives: Mapping[str, str]
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    prunes: bool = False
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial: its values, its objectives (None where they are not complete), and the metric for pruning, by step."""

    number: int
    state: State
    values: Mapping[str, Any]
    objectives: tuple[float, ...] | None = None
    reported: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A running trial to end: the metric was ``value`` at ``step``; None for a value that is not finite."""

    number: int
    step: int
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Values for the next trials, and running trials to end."""

    suggested: tuple[Mapping[str, Any], ...] = ()
    pruned: tuple[Pruned, ...] = ()


def advise(space: Space, trials: Sequence[Trial], want: int) -> Advice:
    """Return the values of ``want`` further trials, and the running trials that do worse than the others."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # a trial that has reported nothing finite
        study = _study(space, trials)
        pruned = _pruned(study, trials) if space.prunes else ()
        distributions = _distributions(space)
        suggested = tuple(
            _rounded(space, study.ask(fixed_distributions=distributions).params) for _ in range(max(0, want))
        )
    return Advice(suggested=suggested, pruned=pruned)


def _study(space: Space, trials: Sequence[Trial]) -> optuna.Study:
    following = max((trial.number for trial in trials), default=-1) + 1
    seed = zlib.crc32(
        f"{space.name}/{following}".encode()
    )  # the random trials at the beginning differ from one another
    study = optuna.create_study(
        directions=["maximize" if order == "max" else "minimize" for order in space.objectives.values()],
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=space.warmup_steps),
    )
    distributions = _distributions(space)
    for trial in trials:
        study.add_trial(_frozen(trial, distributions))
    return study


def _frozen(trial: Trial, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    state = trial.state
    if state == "complete" and trial.objectives is None:
        state = "failed"  # it succeeded, but not all objectives are known
    return optuna.trial.create_trial(
        state=_STATES[state],
        params={name: trial.values[name] for name in distributions},
        distributions=distributions,
        values=list(trial.objectives) if state == "complete" and trial.objectives is not None else None,
        intermediate_values=dict(trial.reported),
    )


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    found: dict[str, BaseDistribution] = {n: CategoricalDistribution(list(v)) for n, v in space.parameters.items()}
    for name, bounds in space.ranges.items():
        if bounds.is_whole:
            found[name] = IntDistribution(int(bounds.low), int(bounds.high), log=bounds.log)
        else:
            found[name] = FloatDistribution(float(bounds.low), float(bounds.high), log=bounds.log)
    return found


def _pruned(study: optuna.Study, trials: Sequence[Trial]) -> tuple[Pruned, ...]:
    found = []
    for trial, frozen in zip(trials, study.get_trials(deepcopy=False), strict=True):
        if trial.state != "running" or not trial.reported or not study.pruner.prune(study, frozen):
            continue
        step = max(trial.reported)
        value = trial.reported[step]
        found.append(Pruned(number=trial.number, step=step, value=value if value == value else None))  # noqa: PLR0124 - NaN
    return tuple(found)


def _rounded(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as people read them in names and command lines: six digits, within the bounds."""
    return {
        name: value if (bounds := space.ranges.get(name)) is None or bounds.is_whole else _near(float(value), bounds)
        for name, value in values.items()
    }


def _near(value: float, bounds: Range) -> float:
    return min(float(bounds.high), max(float(bounds.low), float(f"{value:.{_DIGITS}g}")))


@dataclass(slots=True)
class Reader:
    """Reads the records of trials: once for an ended one, and whenever its file has grown for a running one."""

    space: Space
    ended: dict[tuple[str, str], tuple[Trial, str]] = field(default_factory=dict)
    growing: dict[str, tuple[tuple[int, int], dict[int, float]]] = field(default_factory=dict)

    def trial(self, record: Mapping[str, Any]) -> tuple[Trial, str]:
        """Return a trial with its results, and a text about a missing result of an ended one."""
        key = (record["directory"], record["state"])
        if key in self.ended:
            return self.ended[key]
        directory = Path(record["directory"])
        reported: dict[int, float] = {}
        if self.space.prunes and record["state"] in ("running", "complete", "pruned"):
            reported = self._reported(directory, running=record["state"] == "running")
        given, missing = None, ""
        if record["state"] == "complete":
            given, missing = objectives_given(directory, self.space.objectives)
        trial = Trial(
            number=record["number"], state=record["state"], values=record["values"], objectives=given, reported=reported
        )
        if trial.state != "running":
            self.growing.pop(record["directory"], None)
            self.ended[key] = trial, missing
        return trial, missing

    def _reported(self, directory: Path, *, running: bool) -> dict[int, float]:
        try:
            status = (directory / "metrics.jsonl").stat()
        except OSError:
            return {}
        size = (status.st_ino, status.st_size)
        ((name, order),) = self.space.objectives.items()  # with several, nothing is pruned
        if not running:
            return reported_by_step(directory, name, order, running=False)
        known = self.growing.get(str(directory))
        if known is None or known[0] != size:
            known = size, reported_by_step(directory, name, order, running=True)
            self.growing[str(directory)] = known
        return known[1]


def answer(reader: Reader, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to one line: values to try, trials to end, and the results of each ended trial."""
    read = [reader.trial(record) for record in question["trials"]]
    trials = [trial for trial, _ in read]
    advice = advise(reader.space, trials, question["want"])
    return {
        "suggested": [dict(values) for values in advice.suggested],
        "pruned": [asdict(one) for one in advice.pruned],
        "given": {str(trial.number): trial.objectives for trial in trials if trial.objectives is not None},
        "missing": {str(trial.number): missing for trial, missing in read if missing},
    }


def space_of(fields: Mapping[str, Any]) -> Space:
    """Return the space that the first line describes."""
    ranges = {name: Range(**bounds) for name, bounds in fields["ranges"].items()}
    return Space(**{**fields, "ranges": ranges})


def main(lines: TextIO, out: TextIO) -> int:
    """Answer until the input ends."""
    reader = Reader(space_of(json.loads(lines.readline())))
    for line in lines:
        out.write(json.dumps(answer(reader, json.loads(line))) + "\n")
        out.flush()
    return 0


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main(sys.stdin, sys.stdout))
