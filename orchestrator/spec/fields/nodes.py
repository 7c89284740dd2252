"""The tree of a job file: nodes with their line and column, not yet interpreted.

Standard library only, because the kinds of values (`kinds.py`) are imported wherever a spec is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.spec.problems import quoted

JsonValue = bool | int | float | str | None | list["JsonValue"] | dict[str, "JsonValue"]
"""Any value that JSON can hold. Numbers are finite."""

ScalarKind = Literal["text", "integer", "number", "boolean", "null", "date"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Position at which a node begins. Lines and columns count from 1; 0 for values that did not come from a text."""

    source: str
    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarNode:
    """One value as written. `kind` is its type in YAML 1.1; `as_typed` marks a value typed on a command line."""

    text: str
    kind: ScalarKind
    mark: Mark
    as_typed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode:
    """A sequence."""

    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode:
    """A mapping; its keys are distinct."""

    entries: tuple[tuple[ScalarNode, Node], ...]
    mark: Mark

    def get(self, key: str) -> Node | None:
        """Return the value under a key, or None."""
        return next((value for name, value in self.entries if name.text == key), None)


Node = ScalarNode | ListNode | MapNode


def kind_of(node: Node) -> str:
    """Return the name of a node's kind, for messages."""
    match node:
        case MapNode():
            return "a mapping"
        case ListNode():
            return "a list"
        case ScalarNode(kind="null"):
            return "nothing"
        case ScalarNode(kind="boolean"):
            return f"the YAML boolean {node.text}"
        case ScalarNode():
            return quoted(node.text)


def is_null(node: object) -> bool:
    """Whether a value was left empty or is `null`."""
    return isinstance(node, ScalarNode) and node.kind == "null"


def plain_node(value: JsonValue, source: str) -> Node:
    """Turn plain JSON into the node that a text of the same meaning gives, without a position."""
    mark = Mark(source=source)

    def scalar(text: str, kind: Literal["text", "integer", "number", "boolean", "null"]) -> ScalarNode:
        return ScalarNode(text=text, kind=kind, mark=mark)

    match value:
        case None:
            return scalar("null", "null")
        case bool():
            return scalar("true" if value else "false", "boolean")
        case int():
            return scalar(str(value), "integer")
        case float():
            return scalar(repr(value), "number")
        case str():
            return scalar(value, "text")
        case list():
            return ListNode(items=tuple(plain_node(item, source) for item in value), mark=mark)
        case dict():
            entries = tuple((scalar(str(key), "text"), plain_node(item, source)) for key, item in value.items())
            return MapNode(entries=entries, mark=mark)
