"""Converts a tree of nodes to a `JobSpec` and back: pydantic reads the classes of `model`; its errors get line and column.

Pydantic returns no value where it finds an error, and rules that bind several keys must be applied anyway. So invalid
values are reported and removed, and the rest is read again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from orchestrator.spec.fields.nodes import ListNode, MapNode, Mark, Node, ScalarNode
from orchestrator.spec.fields.records import STORED, TAG, walk
from orchestrator.spec.model import JobSpec
from orchestrator.spec.problems import BadValueError, Path, Problem, dotted
from orchestrator.spec.reader.key_aliases import unknown_key

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

    from orchestrator.spec.fields.nodes import JsonValue
    from orchestrator.spec.fields.records import Key, Record

_STAND_INS = {"name": "job", "entrypoint": "true"}
"""Values that replace invalid required keys of the file, so that the rest can be read."""
_MISSING, _UNKNOWN, _KEY = "missing", ("unexpected_keyword_argument", "extra_forbidden"), "[key]"


@cache
def adapter() -> TypeAdapter[JobSpec]:
    """Return pydantic's reader and writer of a job file; created once, in a process that needs it."""
    from pydantic import TypeAdapter

    return TypeAdapter(JobSpec)


@cache
def all_keys() -> dict[str, tuple[type[Record], Key]]:
    """Return every key by its full path, such as `retry.log_policies[].pattern`."""
    return {path: (record, key) for path, record, key in walk(JobSpec)}


def write_spec(spec: JobSpec) -> dict[str, JsonValue]:
    """Return the canonical JSON form, with every key."""
    return cast("dict[str, JsonValue]", adapter().dump_python(spec, mode="json", by_alias=True))


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of job.yaml, for editors. It accepts all that `parse_job` accepts, and some more."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **adapter().json_schema(by_alias=True),
        "title": "job.yaml",
        "description": "A training job for orch.",
    }


def read_spec(root: MapNode, problems: list[Problem], *, stored: bool = False) -> JobSpec:
    """Read a job file's tree. Errors are added to `problems`; the spec has the defaults of invalid values.

    ``stored``: the tree was accepted before, so only values that cannot be used at all are errors.
    """
    from pydantic import ValidationError

    tree, faults = root, _Faults(root, problems)
    while True:
        try:
            return adapter().validate_python(tree, context=STORED if stored else None)
        except ValidationError as error:
            tree = faults.taken_out(error.errors(include_url=False, include_input=False))


def problem_at(error: BadValueError, mark: Mark, path: Path) -> Problem:
    """Return the problem of a bad value, with its place."""
    return Problem(
        line=mark.line,
        column=mark.column,
        path=dotted(path),
        message=error.message,
        hint=error.hint,
        source=mark.source,
    )


class _Faults:
    """The errors of a tree, by path, and the tree without the invalid values."""

    def __init__(self, root: MapNode, problems: list[Problem]) -> None:
        self._root = root
        self._problems = problems
        self._out: set[Path] = set()
        self._positions: dict[Path, list[int]] = {}
        """Indices of the items that remain in each list."""

    def taken_out(self, errors: list[ErrorDetails]) -> MapNode:
        """Report the errors, and return the tree without the values that they concern."""
        before = len(self._out)
        for error in errors:
            self._take(error)
        if len(self._out) == before:
            raise AssertionError(f"pydantic found something that cannot be taken out: {errors}")
        self._positions = {}
        tree = self._without(self._root, ())
        if not isinstance(tree, MapNode):
            raise TypeError("a job file is a mapping")
        return tree

    def _take(self, error: ErrorDetails) -> None:
        path, is_key = self._place(error["loc"])
        if error["type"] == _MISSING:
            if path not in self._out:  # else the file has the key, and its error has been reported
                self._report(BadValueError("is required", _known(path)[1].doc.text), path[:-1], path)
            self._out.add(path)
            if len(path) > 1:
                self._out.add(path[:-1])
            return
        self._out.add(path)
        if error["type"] in _UNKNOWN:
            siblings = [key.rpartition(".")[2] for key in all_keys() if key.rpartition(".")[0] == _general(path[:-1])]
            bad = unknown_key(path[:-1], str(path[-1]), siblings, all_keys())
            self._report(bad, path, path, at_key=True)
        else:
            self._report(_bad_value(error), path, path, at_key=is_key)

    def _place(self, location: tuple[int | str, ...]) -> tuple[Path, bool]:
        """Return the path in the whole tree, and whether the error is about a key of a mapping."""
        path: Path = ()
        for step in location:
            if isinstance(step, int):
                path = (*path, self._positions[path][step] if path in self._positions else step)
            elif not step.startswith(TAG):
                path = (*path, step)
        is_key = bool(path) and path[-1] == _KEY and _find(self._root, path)[1] is _find(self._root, path[:-1])[1]
        return (path[:-1], True) if is_key else (path, False)

    def _report(self, error: BadValueError, where: Path, path: Path, *, at_key: bool = False) -> None:
        key, value = _find(self._root, where)
        self._problems.append(problem_at(error, (key if at_key and key else value or self._root).mark, path))

    def _without(self, node: Node, path: Path) -> Node:
        match node:
            case MapNode():
                entries = [
                    (key, self._without(value, (*path, key.text)))
                    for key, value in node.entries
                    if (*path, key.text) not in self._out
                ]
                if not path:
                    entries += [(_text(key), _text(value)) for key, value in _STAND_INS.items() if (key,) in self._out]
                return replace(node, entries=tuple(entries))
            case ListNode():
                left = [index for index in range(len(node.items)) if (*path, index) not in self._out]
                self._positions[path] = left
                return replace(node, items=tuple(self._without(node.items[i], (*path, i)) for i in left))
            case _:
                return node


def _bad_value(error: ErrorDetails) -> BadValueError:
    context: dict[str, Any] = error.get("ctx", {})
    if "message" in context:
        return BadValueError(context["message"], context["hint"])
    bad = context.get("error")
    return bad if isinstance(bad, BadValueError) else BadValueError(error["msg"])


def _find(root: Node, path: Path) -> tuple[ScalarNode | None, Node | None]:
    """Return the key and the value at a path, or the nearest value above it that is written out."""
    key: ScalarNode | None = None
    node: Node = root
    for step in path:
        if isinstance(node, MapNode) and isinstance(step, str):
            key, found = next(((name, value) for name, value in node.entries if name.text == step), (None, None))
        elif isinstance(node, ListNode) and isinstance(step, int) and step < len(node.items):
            key, found = None, node.items[step]
        else:
            break
        if found is None:
            break
        node = found
    return key, node


def nearest_mark(root: Node, path: Path) -> Mark:
    """Return the mark of a value, or of the nearest one above it that is written out."""
    node = _find(root, path)[1]
    return (node or root).mark


def _general(path: Path) -> str:
    """Return the path with `[]` for every position."""
    text = ""
    for step in path:
        text += "[]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _known(path: Path) -> tuple[type[Record], Key]:
    return all_keys()[_general(path)]


def _text(text: str) -> ScalarNode:
    return ScalarNode(text=text, kind="text", mark=Mark(source=""))
