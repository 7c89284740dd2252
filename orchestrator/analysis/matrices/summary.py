"""Summarizes the runs of a matrix by configuration: the mean of all runs of each, and their spread. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from orchestrator.analysis.measure.run_summary import summarize_run

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestrator.analysis.reading.series import Run

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
