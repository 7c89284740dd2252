"""Converts Python values and words of a command line to the nodes that a file with the same meaning gives.

Must not name any key. Standard library only: a training process reads its settings with it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from orchestrator.spec.fields.kinds import INTEGER, SCIENTIFIC, YES
from orchestrator.spec.fields.nodes import ListNode, Mark, Node, ScalarKind, ScalarNode

_NOWHERE = Mark(source="")
_NULLS = frozenset({"none", "null"})
_NO = frozenset({"false", "no", "off"})


def typed_node(text: str) -> ScalarNode:
    """Return the node of a command-line word, which needs no quotation marks to distinguish a number from text."""
    return ScalarNode(text=text, kind=_kind(text), mark=_NOWHERE, as_typed=True)


def _kind(text: str) -> ScalarKind:
    if text in _NULLS:
        return "null"
    if text.lower() in YES | _NO:
        return "boolean"
    if INTEGER.fullmatch(text):
        return "integer"
    return "number" if SCIENTIFIC.fullmatch(text) else "text"


def python_node(value: Any) -> Node:
    """Return the node of a Python value. A value that no file can hold becomes text, which its key refuses."""
    match value:
        case None:
            return _scalar("null", "null")
        case bool():
            return _scalar("true" if value else "false", "boolean")
        case int():
            return _scalar(str(int(value)), "integer")
        case float():
            return _scalar(float.__repr__(value), "number")
        case timedelta():
            # Never 1e-06: a duration is not written with an exponent.
            return _scalar(f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s", "text")
        case list() | tuple():
            return ListNode(items=tuple(map(python_node, value)), mark=_NOWHERE)
        case _:
            return _scalar(str(value), "text")


def _scalar(text: str, kind: ScalarKind) -> ScalarNode:
    return ScalarNode(text=text, kind=kind, mark=_NOWHERE)
