# ruff: noqa: D102, ARG002 - the base class documents the three methods; not every shape needs all that they are given
"""The shapes of single values: how one is read from a node, written as JSON, and described by JSON Schema.

One object says all three, so that they cannot drift apart: `read(node)` refuses what `schema()` refuses (and
sometimes more), and `read` of what `write` gave is the same value again. Collections are in `records`. Must not
know any key of job.yaml.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast

from orchestrator.spec.document import ListNode, MapNode, Mark, Node, ScalarNode, kind_of
from orchestrator.spec.model import JsonValue
from orchestrator.spec.problems import BadValueError, Path, Problem, dotted, nearest, quoted
from orchestrator.spec.units import (
    DURATION_PATTERN,
    MAX_DURATION,
    MAX_MEMORY_BYTES,
    MEMORY_PATTERN,
    format_duration,
    parse_duration,
    parse_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
Schema = dict[str, JsonValue]

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{0,17})?")
_SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")
_YES = frozenset({"true", "yes", "on"})
_MAX_TEXT = 4096


class Shape(ABC, Generic[T]):
    """How one kind of value is read, written and described."""

    @abstractmethod
    def read(self, node: Node, path: Path, problems: list[Problem]) -> T:
        """Read a value.

        What is wrong inside a collection is added to `problems` and left out of the value.

        Raises:
            BadValueError: the value as a whole cannot be taken.

        """

    @abstractmethod
    def write(self, value: T) -> JsonValue:
        """Give the value's canonical JSON form, which `read` takes back."""

    @abstractmethod
    def schema(self) -> Schema:
        """Describe, in JSON Schema 2020-12, at least all that `read` takes."""


def written(node: Node, expected: str) -> str:
    """Return a scalar's text as written, or refuse a collection and an empty value."""
    if not isinstance(node, ScalarNode):
        raise BadValueError(f"expected {expected}, got {kind_of(node)}", "write a single value")
    if node.kind == "null" and not node.as_typed:
        raise BadValueError(f"expected {expected}, got nothing", "give a value, or remove the key for its default")
    return node.text


def is_null(node: Node) -> bool:
    """Whether a value was left empty or is `null`."""
    return isinstance(node, ScalarNode) and node.kind == "null"


class Text(Shape[str]):
    """One line or more of text. Numbers and dates count as text, as written; YAML's booleans do not."""

    def __init__(
        self,
        what: str = "text",
        *,
        pattern: str | None = None,
        remedy: str = "",
        max_length: int = _MAX_TEXT,
        check: Callable[[str], None] | None = None,
        empty: bool = False,
    ) -> None:
        self._what = what
        self._pattern = pattern
        self._remedy = remedy
        self._max_length = max_length
        self._check = check
        self._min_length = 0 if empty else 1

    def read(self, node: Node, path: Path, problems: list[Problem]) -> str:
        expected = f"{self._what} as text" if self._what != "text" else "text"
        text = written(node, expected)
        if isinstance(node, ScalarNode) and node.kind == "boolean" and not node.as_typed:
            raise BadValueError(f"expected {expected}, got {kind_of(node)}", f'write "{text}", in quotation marks')
        if len(text) < self._min_length:
            raise BadValueError(f"expected {expected}, got an empty text", self._remedy)
        if len(text) > self._max_length:
            raise BadValueError(f"{self._what} of {len(text)} characters", f"at most {self._max_length}")
        if self._pattern is not None and not re.fullmatch(self._pattern, text):
            raise BadValueError(f"{quoted(text)} is not {self._what}", self._remedy)
        if self._check is not None:
            self._check(text)
        return text

    def write(self, value: str) -> JsonValue:
        return value

    def schema(self) -> Schema:
        schema: Schema = {"type": ["string", "number"], "minLength": self._min_length, "maxLength": self._max_length}
        if self._pattern is not None:
            schema["pattern"] = f"^(?:{self._pattern})$"
        return schema


class Choice(Shape[T]):
    """One of a few words, given as the arguments of a `Literal`."""

    def __init__(self, *words: str, instead: Mapping[str, str] | None = None) -> None:
        self._words = words
        self._instead = instead or {}

    def read(self, node: Node, path: Path, problems: list[Problem]) -> T:
        listed = ", ".join(self._words)
        text = written(node, f"one of {listed}")
        if text not in self._words:
            meant = self._instead.get(text.lower()) or nearest(text, self._words)
            hint = f"did you mean {meant}?" if meant else ""
            raise BadValueError(f"expected one of {listed}, got {quoted(text)}", hint)
        return cast("T", text)

    def write(self, value: T) -> JsonValue:
        return cast("str", value)

    def schema(self) -> Schema:
        return {"enum": list(self._words)}


class Boolean(Shape[bool]):
    """True or false; YAML's other words for them (yes, no, on, off) count too."""

    def read(self, node: Node, path: Path, problems: list[Problem]) -> bool:
        text = written(node, "true or false")
        if not isinstance(node, ScalarNode) or node.kind != "boolean":
            raise BadValueError(f"expected true or false, got {quoted(text)}", "without quotation marks")
        return text.lower() in _YES

    def write(self, value: bool) -> JsonValue:  # noqa: FBT001 - a value, not a switch
        return value

    def schema(self) -> Schema:
        # YAML 1.2 editors read `on` as text.
        words: list[JsonValue] = [
            form for word in ("yes", "no", "on", "off") for form in (word, word.title(), word.upper())
        ]
        return {"anyOf": [{"type": "boolean"}, {"enum": words}]}


class Integer(Shape[int]):
    """A whole number in decimal digits, within bounds."""

    def __init__(self, minimum: int, maximum: int, *, instead: Mapping[int, str] | None = None) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._instead = instead or {}

    def read(self, node: Node, path: Path, problems: list[Problem]) -> int:
        expected = f"a whole number from {self._minimum} to {self._maximum}"
        text = written(node, expected)
        if not _INTEGER.fullmatch(text) or (isinstance(node, ScalarNode) and node.kind != "integer"):
            raise BadValueError(f"expected {expected}, got {quoted(text)}", _number_hint(node, text))
        value = int(text)
        if not self._minimum <= value <= self._maximum:
            raise BadValueError(f"expected {expected}, got {value}", self._instead.get(value, ""))
        return value

    def write(self, value: int) -> JsonValue:
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self._minimum, "maximum": self._maximum}


class Number(Shape[float]):
    """A number with at most `digits` decimals, within bounds."""

    def __init__(
        self, minimum: float, maximum: float, *, digits: int, check: Callable[[float], None] | None = None
    ) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._digits = digits
        self._check = check

    def read(self, node: Node, path: Path, problems: list[Problem]) -> float:
        expected = f"a number from {self._minimum:g} to {self._maximum:g}"
        text = written(node, expected)
        number = isinstance(node, ScalarNode) and node.kind in ("integer", "number")
        if not number or not _NUMBER.fullmatch(text):
            raise BadValueError(f"expected {expected}, got {quoted(text)}", _number_hint(node, text))
        value = float(text) + 0.0  # -0 becomes 0
        if not self._minimum <= value <= self._maximum:
            raise BadValueError(f"expected {expected}, got {quoted(text)}")
        if round(value, self._digits) != value:
            raise BadValueError(f"expected at most {self._digits} decimals, got {quoted(text)}", "round it")
        if self._check is not None:
            self._check(value)
        return value

    def write(self, value: float) -> JsonValue:
        return int(value) if value.is_integer() else value

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self._minimum, "maximum": self._maximum}


class Duration(Shape[timedelta]):
    """A span of time: `1h30m`, `90s`, `500ms`, or a number of seconds."""

    def __init__(self, *, minimum: timedelta = timedelta(0)) -> None:
        self._minimum = minimum

    def read(self, node: Node, path: Path, problems: list[Problem]) -> timedelta:
        value = parse_duration(written(node, "a duration such as 10m"))
        if value < self._minimum:
            raise BadValueError(f"expected at least {format_duration(self._minimum)}, got {format_duration(value)}")
        return value

    def write(self, value: timedelta) -> JsonValue:
        return format_duration(value)

    def schema(self) -> Schema:
        seconds: Schema = {"type": "number", "minimum": 0, "maximum": int(MAX_DURATION.total_seconds())}
        return {"anyOf": [seconds, {"type": "string", "pattern": DURATION_PATTERN, "minLength": 1}]}


class Memory(Shape[int]):
    """An amount of memory, in bytes: `8GB` (10^9), `8GiB` (2^30)."""

    def __init__(self, *, minimum: int = 0) -> None:
        self._minimum = minimum

    def read(self, node: Node, path: Path, problems: list[Problem]) -> int:
        text = written(node, "an amount of memory such as 8GB")
        value = parse_memory(text)
        if value < self._minimum:
            unit = f"a number alone is bytes: write {text}GB" if text.isdecimal() else "write 8GB or 8GiB"
            raise BadValueError(f"{quoted(text)} is less than {self._minimum} bytes", unit)
        return value

    def write(self, value: int) -> JsonValue:
        return value

    def schema(self) -> Schema:
        number: Schema = {"type": "number", "minimum": self._minimum, "maximum": MAX_MEMORY_BYTES}
        return {"anyOf": [number, {"type": "string", "pattern": MEMORY_PATTERN}]}


class Word(Shape[T]):
    """A single word that stands for a value, such as `auto`, or `unlimited` for None."""

    def __init__(self, word: str, value: T) -> None:
        self.word = word
        self.value = value

    def read(self, node: Node, path: Path, problems: list[Problem]) -> T:
        text = written(node, self.word)
        if text != self.word:
            raise BadValueError(f"expected {self.word}, got {quoted(text)}")
        return self.value

    def write(self, value: T) -> JsonValue:
        return self.word

    def schema(self) -> Schema:
        return {"const": self.word}


class Maybe(Shape[T | None]):
    """A value, or `null` for none."""

    def __init__(self, inner: Shape[T]) -> None:
        self.inner = inner

    def read(self, node: Node, path: Path, problems: list[Problem]) -> T | None:
        return None if is_null(node) else self.inner.read(node, path, problems)

    def write(self, value: T | None) -> JsonValue:
        return None if value is None else self.inner.write(value)

    def schema(self) -> Schema:
        return {"anyOf": [self.inner.schema(), {"type": "null"}]}


class Json(Shape[JsonValue]):
    """Whatever JSON can hold, for keys that another part of orch checks. Ambiguous YAML is refused."""

    def __init__(self, *, scalar: bool = False) -> None:
        self._scalar = scalar

    def read(self, node: Node, path: Path, problems: list[Problem]) -> JsonValue:
        if isinstance(node, ScalarNode):
            if self._scalar and is_null(node):
                raise BadValueError("expected text, a number, or true or false, got nothing", "give a value")
            return _json_scalar(node)
        if self._scalar:
            raise BadValueError(f"expected text, a number, or true or false, got {kind_of(node)}")
        if isinstance(node, ListNode):
            return [self._item(item, (*path, i), problems) for i, item in enumerate(node.items)]
        return {key.text: self._item(value, (*path, key.text), problems) for key, value in node.entries}

    def _item(self, node: Node, path: Path, problems: list[Problem]) -> JsonValue:
        try:
            return self.read(node, path, problems)
        except BadValueError as error:
            problems.append(located(error, node, path))
            return None

    def write(self, value: JsonValue) -> JsonValue:
        return value

    def schema(self) -> Schema:
        return {"type": ["string", "number", "boolean"]} if self._scalar else {}


def located(error: BadValueError, node: Node, path: Path) -> Problem:
    """Say where a bad value stands."""
    mark = node.mark
    return Problem(
        line=mark.line,
        column=mark.column,
        path=dotted(path),
        message=error.message,
        hint=error.hint,
        source=mark.source,
    )


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


def _number_hint(node: Node, text: str) -> str:
    if isinstance(node, ScalarNode) and node.kind == "text" and _NUMBER.fullmatch(text):
        return "remove the quotation marks"
    return "write it in decimal digits, such as 8" if any(c.isdigit() for c in text) else ""


def _json_scalar(node: ScalarNode) -> JsonValue:
    text = node.text
    match node.kind:
        case "null":
            return None
        case "boolean" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case "integer" if _INTEGER.fullmatch(text):
            return int(text)
        case "number" if _SCIENTIFIC.fullmatch(text) and math.isfinite(float(text)):
            return float(text)
        case "date" | "text":
            return text
        case _:
            raise BadValueError(
                f"{quoted(text)} means different things to different readers of YAML",
                "write true, false or plain decimal digits, or put a text in quotation marks",
            )
