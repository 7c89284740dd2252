"""Converts one job file to many jobs: the combinations of `matrix:`, and the file's tree with the values of one of them.

`${matrix.NAME}` stands for a value. Where it is the whole text, the value keeps its type (`num_workers: ${matrix.gpus}`); in the entry point it
becomes part of one word, quoted as a shell would need it, so that it is never a further argument; in the name it is written with
letters, digits and hyphens. Pure; works on the tree before pydantic reads it, so that every error has its line and column.

The search of `strategy: optuna`: later trials are suggested while it runs (`analysis.search`); the values of the first are fixed here, so that a
submission needs no Optuna to be accepted, and has jobs.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Final

from orchestrator.spec.entrypoint import EntrypointError, parse_entrypoint
from orchestrator.spec.fields import NAME_PATTERN, ListNode, MapNode, Node, ScalarNode, plain_node
from orchestrator.spec.model import MAX_MATRIX_JOBS
from orchestrator.spec.problems import BadValueError, nearest, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.spec.model import CheckpointSpec, MatrixSpec, MatrixValue, RangeSpec
    from orchestrator.spec.problems import Path

_PLACEHOLDER = re.compile(r"\$\{matrix\.([^}]*)\}")
_FIXED = frozenset({"version", "matrix", "working_dir", "runtime_env", "secrets"})
"""Keys that must be the same for all jobs of a matrix: they share one archive."""
_CODE_RUNNERS = re.compile(r"(?:(?:ba|da|z|k|c|tc|fi)?sh|python[0-9.]*|perl|ruby|node|Rscript)")
_CODE_OPTION = re.compile(r"-[A-Za-z]*[ce]")


def combinations(matrix: MatrixSpec) -> tuple[Combination, ...]:
    """Return every combination of a checked matrix: the grid without `exclude`, the last parameter fastest, then `include`.

    For a search, return the combinations of its first trials.
    """
    if matrix.strategy == "optuna":
        return first_trials(matrix)
    grid = (dict(zip(matrix.parameters, values, strict=True)) for values in product(*matrix.parameters.values()))
    found = [values for values in grid if values and not any(_fits(values, out) for out in matrix.exclude)]
    found += [dict(values) for values in matrix.include]
    return tuple(Combination(index=index, values=values) for index, values in enumerate(found))


def matrix_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    """Yield the errors of a matrix by itself, each as its place, its message, and what to do."""
    if not matrix.parameters and not matrix.include and not matrix.ranges:
        yield ("matrix",), "a matrix without parameters makes no job", "write parameters: {lr: [0.1, 0.01]}"
        return
    yield from _parameter_faults(matrix)
    yield from search_faults(matrix)
    if matrix.strategy == "optuna":
        return
    yield from _exclude_faults(matrix)
    yield from _include_faults(matrix)


def _parameter_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    for name, values in matrix.parameters.items():
        path: Path = ("matrix", "parameters", name)
        if not values:
            yield path, "no values", "list at least one"
        for place, value in enumerate(values):
            if any(_same(value, other) for other in values[:place]):
                yield (
                    (*path, place),
                    f"{text_of(value)} occurs twice",
                    "a parameter of its own repeats runs: seed: [1, 2]",
                )
    jobs = prod(len(values) for values in matrix.parameters.values()) if matrix.parameters else 0
    if matrix.strategy == "grid" and jobs + len(matrix.include) > MAX_MATRIX_JOBS:
        message = f"{jobs + len(matrix.include)} combinations, more than {MAX_MATRIX_JOBS}"
        yield ("matrix", "parameters"), message, "try fewer values, or split them over several files"


def _exclude_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    for place, out in enumerate(matrix.exclude):
        path: Path = ("matrix", "exclude", place)
        unknown = sorted(out.keys() - matrix.parameters.keys())
        for name in unknown:
            yield path, f"excludes by {quoted(name)}, which is not a parameter", _listed(matrix.parameters)
        strange = [n for n, v in out.items() if n not in unknown and not any(_same(v, x) for x in matrix.parameters[n])]
        for name in strange:
            listed = ", ".join(map(text_of, matrix.parameters[name]))
            yield path, f"{name} is never {text_of(out[name])}", f"its values are {listed}"
        if not out:
            yield path, "excludes every combination", "name a parameter and its value"
    if matrix.parameters and all(matrix.parameters.values()) and not matrix.include and not _left(matrix):
        yield ("matrix", "exclude"), "no combination is left", "exclude less"


def _left(matrix: MatrixSpec) -> bool:
    """Whether some combination is not excluded; examines at most the permitted number of combinations."""
    if prod(len(values) for values in matrix.parameters.values()) > MAX_MATRIX_JOBS:
        return True
    return bool(combinations(matrix))


def _include_faults(matrix: MatrixSpec) -> Iterator[tuple[Path, str, str]]:
    names = matrix.parameters.keys() or (matrix.include[0].keys() if matrix.include else ())
    small = prod(len(values) for values in matrix.parameters.values()) <= MAX_MATRIX_JOBS
    known = [c.values for c in combinations(replace(matrix, include=()))] if small and matrix.parameters else []
    for place, values in enumerate(matrix.include):
        path: Path = ("matrix", "include", place)
        missing, more = sorted(names - values.keys()), sorted(values.keys() - names)
        if missing or not values:
            yield path, f"has no value for {', '.join(missing) or 'any parameter'}", "give a value for each parameter"
        if more:
            yield path, f"{', '.join(map(quoted, more))} is not a parameter", _listed(names)
        if not missing and not more and values and any(_fits(values, other) for other in known):
            yield path, "this combination is there already", "remove it"
        known.append(values)


def _listed(names: object) -> str:
    return f"parameters: {', '.join(names)}" if names else "there are no parameters"  # type: ignore[arg-type]  # keys of a mapping


def _fits(values: Mapping[str, MatrixValue], wanted: Mapping[str, MatrixValue]) -> bool:
    return all(name in values and _same(values[name], value) for name, value in wanted.items())


def _same(one: MatrixValue, other: MatrixValue) -> bool:
    """Whether the values are equal, and both or neither boolean: in Python, True equals 1."""
    return isinstance(one, bool) is isinstance(other, bool) and one == other


def text_of(value: MatrixValue) -> str:
    """Return a value as YAML writes it."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def unit_name(template: str) -> str:
    """Return the name of the whole matrix: the name of its jobs without the values."""
    name = re.sub("-+", "-", _PLACEHOLDER.sub("", template)).strip("-")
    return name if re.fullmatch(NAME_PATTERN, name) else "matrix"


def used_parameters(root: Node) -> set[str]:
    """Return the parameters that occur anywhere in the tree."""
    return {name for _, scalar in _scalars(root, ()) for name in _PLACEHOLDER.findall(scalar.text)}


def template_faults(root: MapNode, parameters: Sequence[str]) -> Iterator[tuple[Path, ScalarNode, BadValueError]]:
    """Yield placeholders that name no parameter or are in a key that all jobs share, and errors of the entry point."""
    for path, scalar in _scalars(root, ()):
        for name in _PLACEHOLDER.findall(scalar.text):
            if name not in parameters:
                meant = nearest(name, list(parameters))
                hint = (
                    f"did you mean ${{matrix.{meant}}}?" if meant else f"parameters: {', '.join(parameters) or 'none'}"
                )
                yield path, scalar, BadValueError(f"{quoted(name)} is not a parameter of the matrix", hint)
            elif path[0] in _FIXED:
                hint = "use it in entrypoint, env, name, or another key"
                yield path, scalar, BadValueError(f"{path[0]} is the same for all jobs of a matrix", hint)
        if path == ("entrypoint",) and (error := _entrypoint_fault(scalar.text)) is not None:
            yield path, scalar, error


def _scalars(node: Node, path: Path) -> Iterator[tuple[Path, ScalarNode]]:
    match node:
        case MapNode():
            for key, value in node.entries:
                yield from _scalars(value, (*path, key.text))
        case ListNode():
            for place, item in enumerate(node.items):
                yield from _scalars(item, (*path, place))
        case ScalarNode():
            if _PLACEHOLDER.search(node.text):
                yield path, node


def _entrypoint_fault(text: str) -> BadValueError | None:
    """Return the error of a command that cannot take values: it is invalid by itself, or a value would become code."""
    try:
        words = parse_entrypoint(_PLACEHOLDER.sub("1", text)).argv
    except EntrypointError as error:
        return error
    marked = shlex.split(text.replace("\\\n", " "))
    for place, word in enumerate(words[:-1]):
        code = _CODE_RUNNERS.fullmatch(words[place - 1].rpartition("/")[2]) if place else None
        if code and _CODE_OPTION.fullmatch(word) and any(map(_PLACEHOLDER.search, marked[place + 1 : place + 2])):
            return BadValueError(
                f"a value of the matrix would become code of {words[place - 1]}",
                "put it into env: {NAME: ${matrix.NAME}}, and use that variable in the code",
            )
    return None


def filled(root: MapNode, values: Mapping[str, MatrixValue]) -> MapNode:
    """Return the tree of one job: every placeholder is replaced by its value, and `matrix` is removed."""
    entries: list[tuple[ScalarNode, Node]] = []
    for key, node in root.entries:
        if key.text == "matrix":
            continue
        if key.text == "entrypoint" and isinstance(node, ScalarNode):
            entries.append((key, replace(node, text=_filled_command(node.text, values))))
        elif key.text == "name" and isinstance(node, ScalarNode):
            entries.append((key, replace(node, text=_filled_name(node.text, values))))
        else:
            entries.append((key, _filled(node, values)))
    return replace(root, entries=tuple(entries))


def _filled(node: Node, values: Mapping[str, MatrixValue]) -> Node:
    match node:
        case MapNode():
            return replace(node, entries=tuple((key, _filled(value, values)) for key, value in node.entries))
        case ListNode():
            return replace(node, items=tuple(_filled(item, values) for item in node.items))
        case ScalarNode():
            whole = _PLACEHOLDER.fullmatch(node.text)
            if whole:
                # As typed: where the key takes text, any value counts as text.
                return replace(_scalar(values[whole[1]]), mark=node.mark, as_typed=True)
            return replace(node, text=_with_values(node.text, values)) if "${matrix." in node.text else node


def _scalar(value: MatrixValue) -> ScalarNode:
    node = plain_node(value, "")
    assert isinstance(node, ScalarNode)
    return node


def _with_values(text: str, values: Mapping[str, MatrixValue]) -> str:
    return _PLACEHOLDER.sub(lambda match: text_of(values[match[1]]), text)


def _filled_command(text: str, values: Mapping[str, MatrixValue]) -> str:
    if "${matrix." not in text:
        return text
    words = shlex.split(text.replace("\\\n", " "))
    return shlex.join(_with_values(word, values) for word in words)


def _filled_name(text: str, values: Mapping[str, MatrixValue]) -> str:
    def plain(match: re.Match[str]) -> str:
        value = text_of(values[match[1]]).lower()
        return re.sub("[^a-z0-9]+", "-", value.replace("+", "")).strip("-")

    return re.sub("-+", "-", _PLACEHOLDER.sub(plain, text)).strip("-") if "${matrix." in text else text


MEASURED: Final = ("energy_joules", "seconds")
"""Objectives that orch measures; every other one is a metric that the script reports."""
_MAX_CHECKED: Final = 50


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
        for place in range(min(_MAX_CHECKED, max(2, longest)))
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
