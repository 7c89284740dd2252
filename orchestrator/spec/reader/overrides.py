"""Applies `--set a.b=c` from a command line to the tree of a job file before it is read.

Must not name any key of job.yaml.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from orchestrator.spec.fields.nodes import ListNode, MapNode, Mark, Node, ScalarNode, kind_of
from orchestrator.spec.problems import BadValueError, Problem, SpecError, shown
from orchestrator.spec.reader.document import compose

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEY_END = re.compile(r"(?<!\\)=")
_STEP_END = re.compile(r"(?<!\\)\.")
_MAX_STEPS = 16


def apply_overrides(root: MapNode, overrides: Sequence[str], problems: list[Problem]) -> MapNode:
    r"""Set each `path=value` in turn; what cannot be set is added to `problems`.

    The value is read as YAML: a scalar, or a list or mapping in brackets. Where the key takes text, or it is neither,
    it counts as typed, since users rarely quote twice on a command line. Lists take positions (`notify.0.url=...`); `\.` is a dot inside a key.
    """
    tree: Node = root
    for override in overrides:
        source = f"--set {shown(override)}"
        try:
            steps, text = _split(override)
            tree = _set(tree, steps, _value(text, source, problems))
        except SpecError as error:
            problems.extend(error.problems)
        except BadValueError as error:
            problems.append(Problem(line=0, column=0, path="", message=error.message, hint=error.hint, source=source))
    return tree if isinstance(tree, MapNode) else root


def _split(override: str) -> tuple[list[str], str]:
    equals = _KEY_END.search(override)
    if equals is None:
        raise BadValueError("there is no `=`", "write --set resources.num_workers=4")
    steps = [step.replace("\\.", ".").replace("\\=", "=") for step in _STEP_END.split(override[: equals.start()])]
    if not all(step and step.isprintable() for step in steps) or len(steps) > _MAX_STEPS:
        raise BadValueError("the part before `=` is not a key", "write keys joined by dots: resources.num_workers")
    return steps, override[equals.end() :]


def _value(text: str, source: str, problems: list[Problem]) -> Node:
    as_text = ScalarNode(text=text, kind="text", mark=Mark(source=source), as_typed=True)
    collection = text.lstrip()[:1] in ("[", "{")
    found: list[Problem] = []
    try:
        node = compose(text, source=source, problems=found)
    except SpecError as error:
        if collection or not text.isprintable():
            raise SpecError(dataclasses.replace(problem, line=0, column=0) for problem in error.problems) from error
        return as_text
    if node is None:
        return dataclasses.replace(as_text, kind="null")
    if isinstance(node, ScalarNode) and not found:
        return dataclasses.replace(node, mark=as_text.mark, as_typed=True)
    if not collection:  # such as `a: b`, which YAML takes for a mapping
        return as_text
    problems.extend(dataclasses.replace(problem, line=0, column=0) for problem in found)
    return _at(node, as_text.mark)


def _at(node: Node, mark: Mark) -> Node:
    """Give every node below the same mark, because a position within an argument is of little use."""
    match node:
        case ScalarNode():
            return dataclasses.replace(node, mark=mark)
        case ListNode():
            return ListNode(items=tuple(_at(item, mark) for item in node.items), mark=mark)
        case MapNode():
            entries = tuple((dataclasses.replace(key, mark=mark), _at(value, mark)) for key, value in node.entries)
            return MapNode(entries=entries, mark=mark)


def _set(node: Node | None, steps: Sequence[str], value: Node) -> Node:
    """Return the tree with one value replaced or added; the given tree stays as it is."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if isinstance(node, ListNode):
        if not step.isdecimal() or int(step[:9]) > len(node.items):
            raise BadValueError(
                f"{shown(step)} is not a position in a list of {len(node.items)}", "positions count from 0"
            )
        items = list(node.items)
        index = int(step[:9])
        below = _set(items[index] if index < len(items) else None, rest, value)
        return ListNode(items=(*items[:index], below, *items[index + 1 :]), mark=node.mark)
    if isinstance(node, MapNode):
        entries = {key.text: (key, old) for key, old in node.entries}
        key, old = entries.get(step, (ScalarNode(text=step, kind="text", mark=value.mark), None))
        entries[step] = (key, _set(old, rest, value))
        return MapNode(entries=tuple(entries.values()), mark=node.mark)
    if isinstance(node, ScalarNode) and node.kind != "null":
        raise BadValueError(
            f"nothing can be set below {kind_of(node)}", "set the key itself, or remove it from the file"
        )
    if step == "0":
        return ListNode(items=(_set(None, rest, value),), mark=value.mark)
    key = ScalarNode(text=step, kind="text", mark=value.mark)
    return MapNode(entries=((key, _set(None, rest, value)),), mark=value.mark)
