"""Converts one job file to many jobs: the combinations of `matrix:`, and the file's tree with the values of one of them.

`${matrix.NAME}` stands for a value. Where it is the whole text, the value keeps its type (`num_workers: ${matrix.gpus}`); in the entry point it
becomes part of one word, quoted as a shell would need it, so that it is never a further argument; in the name it is written with
letters, digits and hyphens. Pure; works on the tree before pydantic reads it, so that every error has its line and column.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from orchestrator.spec.entrypoint import EntrypointError, parse_entrypoint
from orchestrator.spec.fields.nodes import ListNode, MapNode, Node, ScalarNode, plain_node
from orchestrator.spec.fields.rules import NAME_PATTERN
from orchestrator.spec.model import MAX_MATRIX_JOBS
from orchestrator.spec.problems import BadValueError, nearest, quoted
from orchestrator.spec.search import Combination, first_trials, search_faults

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from orchestrator.spec.model import MatrixSpec, MatrixValue
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
