"""The search of `matrix: {strategy: optuna}`: its parameters, its first trials, and the errors in its keys. Pure.

Later trials are suggested while the search runs (`analysis.search`); the values of the first are fixed here, so that a submission
needs no Optuna to be accepted, and has jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.spec.problems import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.spec.model import CheckpointSpec, MatrixSpec, MatrixValue, RangeSpec
    from orchestrator.spec.problems import Path

MEASURED: Final = ("energy_joules", "seconds")
"""Objectives that orch measures; every other one is a metric that the script reports."""
_MOST_CHECKED: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """The values of one job of a matrix, by parameter, and its place among all of them."""

    index: int
    values: Mapping[str, MatrixValue]


def parameter_names(matrix: MatrixSpec) -> tuple[str, ...]:
    """Return the parameters of a matrix, in order."""
    named = (*matrix.parameters, *matrix.ranges)
    return named or (tuple(matrix.include[0]) if matrix.include else ())


def first_trials(matrix: MatrixSpec) -> tuple[Combination, ...]:
    """Return the first trials of a search: `include`, or the middle of every range with the first of every list."""
    begun = matrix.include or (
        {
            **{name: values[0] for name, values in matrix.parameters.items()},
            **{name: _middle(bounds) for name, bounds in matrix.ranges.items()},
        },
    )
    return tuple(Combination(index=index, values=dict(values)) for index, values in enumerate(begun))


def trials_to_check(matrix: MatrixSpec) -> tuple[Mapping[str, MatrixValue], ...]:
    """Return values that only later trials may have: both bounds of every range, and every value of every list."""
    longest = max((len(values) for values in matrix.parameters.values()), default=0)
    return tuple(
        {
            **{name: values[place % len(values)] for name, values in matrix.parameters.items()},
            **{name: bounds.high if place % 2 else bounds.low for name, bounds in matrix.ranges.items()},
        }
        for place in range(min(_MOST_CHECKED, max(2, longest)))
    )


def _middle(bounds: RangeSpec) -> int | float:
    if bounds.log:
        middle = math.sqrt(bounds.low) * math.sqrt(bounds.high)
    else:
        middle = bounds.low + (bounds.high - bounds.low) / 2
    return round(middle) if is_whole(bounds) else float(f"{middle:.6g}")


def is_whole(bounds: RangeSpec) -> bool:
    """Whether the range has whole numbers only."""
    return isinstance(bounds.low, int) and isinstance(bounds.high, int)


def search_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    """Yield the errors in the keys of a search; for a grid, yield the keys of a search, which have no effect."""
    if matrix.strategy == "grid":
        yield from _grid_faults(matrix)
        return
    if not matrix.parameters and not matrix.ranges:
        yield ("matrix",), "a search without parameters", "write ranges: {lr: {low: 1e-5, high: 0.1, log: true}}"
    if matrix.exclude:
        yield ("matrix", "exclude"), "exclude has no effect in a search", "list only the values to try"
    if matrix.trials is None:
        yield ("matrix",), "the search has no number of trials", "add trials: 20"
    elif len(matrix.include) > matrix.trials:
        message = f"{len(matrix.include)} entries for {matrix.trials} trials"
        yield ("matrix", "include"), message, f"set trials to {len(matrix.include)} or more"
    for name, bounds in matrix.ranges.items():
        yield from _range_faults(name, bounds, matrix)
    yield from _first_faults(matrix)
    yield from _pruner_faults(matrix)


def _grid_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    given = {
        "ranges": matrix.ranges,
        "trials": matrix.trials,
        "objectives": matrix.objectives,
        "pruner": matrix.pruner,
        "warmup_steps": matrix.warmup_steps,
    }
    for key, value in given.items():
        if value:
            yield ("matrix", key), f"{key} has no effect with strategy: grid", "add strategy: optuna, or remove it"


def _range_faults(name: str, bounds: RangeSpec, matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    path: Path = ("matrix", "ranges", name)
    if name in matrix.parameters:
        yield path, f"{name} is in parameters too", "give it a list, or bounds"
    if not bounds.low < bounds.high:
        yield path, f"low is {bounds.low}, high is {bounds.high}", "low is the smaller one"
    elif bounds.log and bounds.low <= 0:
        yield path, f"log needs bounds above 0, and low is {bounds.low}", "for example low: 1e-5"


def _first_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    names = {*matrix.parameters, *matrix.ranges}
    for place, values in enumerate(matrix.include):
        path: Path = ("matrix", "include", place)
        if names and (missing := sorted(names - values.keys())):
            yield path, f"has no value for {', '.join(missing)}", "give a value for each parameter"
        if more := sorted(values.keys() - names):
            yield path, f"{', '.join(map(quoted, more))} is not a parameter", f"parameters: {', '.join(sorted(names))}"
        for name, value in values.items():
            if name in matrix.parameters and not any(
                value == x and type(value) is type(x) for x in matrix.parameters[name]
            ):
                yield path, f"{name} is never {value}", "add the value to the parameter's list"
            elif name in matrix.ranges and not _within(value, matrix.ranges[name]):
                yield path, f"{name} is never {value}", "choose a value between low and high"


def _within(value: MatrixValue, bounds: RangeSpec) -> bool:
    if isinstance(value, bool | str) or (is_whole(bounds) and not isinstance(value, int)):
        return False
    return bounds.low <= value <= bounds.high


def _pruner_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    if matrix.pruner != "median":
        if matrix.warmup_steps and matrix.pruner == "none":
            yield (
                ("matrix", "warmup_steps"),
                "warmup_steps has no effect with pruner: none",
                "remove it, or set pruner: median",
            )
        return
    if len(matrix.objectives) > 1:
        yield ("matrix", "pruner"), "trials with several objectives are not pruned", "remove pruner"
    elif matrix.objectives and next(iter(matrix.objectives)) in MEASURED:
        yield ("matrix", "pruner"), "only a reported metric can be pruned by", "remove pruner"


def objectives_of(matrix: MatrixSpec, checkpoint: CheckpointSpec) -> Mapping[str, str]:
    """Return the objectives of the search by name: `min` or `max`. Empty where matrix and checkpoints define none."""
    if matrix.objectives or checkpoint.score_attribute is None or checkpoint.score_order is None:
        return matrix.objectives
    return {checkpoint.score_attribute: checkpoint.score_order}


def prunes(matrix: MatrixSpec, objectives: Mapping[str, str]) -> bool:
    """Whether trials of the search are pruned, which requires a single objective that the script reports."""
    return matrix.pruner != "none" and len(objectives) == 1 and not any(name in MEASURED for name in objectives)
