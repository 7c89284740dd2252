# ruff: noqa: D102 - the base class documents the three methods
"""The kinds of values in job.yaml, as annotations of the fields in `model`: how pydantic reads, writes and describes each.

A single value is read from its node as written: the kind of its key decides what `no` or `1_000` means. Pydantic does
the rest: records, lists, mappings, required and unknown keys, all errors in one pass. Must not name any key of job.yaml, and
imports pydantic only for a schema, because a spec's classes are also imported where nothing is parsed.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, get_args

from orchestrator.spec.fields.nodes import ListNode, Mark, Node, ScalarKind, ScalarNode, is_null, kind_of
from orchestrator.spec.problems import BadValueError, Path, nearest, quoted
from orchestrator.spec.units import (
    DURATION_PATTERN,
    MAX_MEMORY_BYTES,
    MEMORY_PATTERN,
    format_duration,
    parse_duration,
    parse_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

    from orchestrator.spec.fields.nodes import Node

INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{0,17})?")
SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")
YES = frozenset({"true", "yes", "on"})
_MAX_TEXT = 4096
_NOWHERE = Mark(source="")
Schema = dict[str, Any]


class Doc:
    """Meaning of a key in one line, for the JSON Schema, the documentation and the message that the key is missing.

    ``unit`` is the unit of the key's value, for the help of a command line.
    """

    def __init__(self, text: str, unit: str = "") -> None:
        self.text = text
        self.unit = unit

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {"description": self.text, **handler(schema)}


class Kind:
    """Base of the kinds: reads a value from its node, writes it as JSON, and describes it by JSON Schema 2020-12."""

    def read(self, node: Node) -> Any:
        """Read a value. Raises BadValueError."""
        raise NotImplementedError

    def write(self, value: Any) -> Any:
        """Return the canonical JSON form, which `read` accepts."""
        return value

    def describe(self) -> Schema:
        """Return a JSON Schema that accepts at least everything that `read` accepts."""
        raise NotImplementedError

    def _read(self, value: Node | str) -> Any:
        # A key is always text, also where YAML reads another type: `on:` needs no quotation marks.
        return self.read(ScalarNode(text=value, kind="text", mark=_NOWHERE) if isinstance(value, str) else value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        # An object that has a written form is written in that form; text, numbers and lists are written unchanged.
        form = cs.plain_serializer_function_ser_schema(self.write)
        return cs.no_info_plain_validator_function(self._read, serialization=form)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return self.describe()


def written(node: Node, expected: str) -> str:
    """Return a scalar's text as written, or refuse a collection and an empty value."""
    if not isinstance(node, ScalarNode):
        raise BadValueError(f"expected {expected}, got {kind_of(node)}", "write a single value")
    if node.kind == "null" and not node.as_typed:
        raise BadValueError(f"expected {expected}, got nothing", "give a value, or remove the key for its default")
    return node.text


class Text(Kind):
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

    def read(self, node: Node) -> str:
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

    def describe(self) -> Schema:
        schema: Schema = {"type": ["string", "number"], "minLength": self._min_length, "maxLength": self._max_length}
        if self._pattern is not None:
            schema["pattern"] = f"^(?:{self._pattern})$"
        return schema


class Choice(Kind):
    """One of a few words: those given here, else the arguments of a `Literal`."""

    def __init__(self, *, instead: Mapping[str, str] | None = None, words: tuple[str, ...] = ()) -> None:
        self._words = words
        self._instead = instead or {}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        self._words = self._words or get_args(source)
        return super().__get_pydantic_core_schema__(source, handler)

    def read(self, node: Node) -> str:
        listed = ", ".join(self._words)
        text = written(node, f"one of {listed}")
        if text not in self._words:
            meant = self._instead.get(text.lower()) or nearest(text, self._words)
            hint = f"did you mean {meant}?" if meant else ""
            raise BadValueError(f"expected one of {listed}, got {quoted(text)}", hint)
        return text

    def describe(self) -> Schema:
        return {"enum": list(self._words)}


class Boolean(Kind):
    """True or false; YAML's other words for them (yes, no, on, off) count too."""

    def read(self, node: Node) -> bool:
        text = written(node, "true or false")
        if not isinstance(node, ScalarNode) or node.kind != "boolean":
            raise BadValueError(f"expected true or false, got {quoted(text)}", "without quotation marks")
        return text.lower() in YES

    def describe(self) -> Schema:
        # YAML 1.2 editors read `on` as text.
        words: list[str] = [form for word in ("yes", "no", "on", "off") for form in (word, word.title(), word.upper())]
        return {"anyOf": [{"type": "boolean"}, {"enum": words}]}


class Whole(Kind):
    """A whole number in decimal digits, within bounds."""

    def __init__(self, minimum: int, maximum: int | None = None, *, instead: Mapping[int, str] | None = None) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._instead = instead or {}

    def read(self, node: Node) -> int:
        bounds = f"of at least {self._minimum}" if self._maximum is None else f"from {self._minimum} to {self._maximum}"
        expected = f"a whole number {bounds}"
        text = written(node, expected)
        if not INTEGER.fullmatch(text) or (isinstance(node, ScalarNode) and node.kind != "integer"):
            raise BadValueError(f"expected {expected}, got {quoted(text)}", _number_hint(node, text))
        value = int(text)
        if value < self._minimum or (self._maximum is not None and value > self._maximum):
            raise BadValueError(f"expected {expected}, got {value}", self._instead.get(value, ""))
        return value

    def describe(self) -> Schema:
        most = {} if self._maximum is None else {"maximum": self._maximum}
        return {"type": "integer", "minimum": self._minimum, **most}


class Number(Kind):
    """A number with at most `digits` decimals, within bounds."""

    def __init__(
        self, minimum: float, maximum: float, *, digits: int, check: Callable[[float], None] | None = None
    ) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._digits = digits
        self._check = check

    def read(self, node: Node) -> float:
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

    def write(self, value: float) -> Any:
        return int(value) if value.is_integer() else value

    def describe(self) -> Schema:
        return {"type": "number", "minimum": self._minimum, "maximum": self._maximum}


class Positive(Kind):
    """A number above 0, also as `1e12`."""

    def read(self, node: Node) -> float:
        text = written(node, "a number above 0")
        number = isinstance(node, ScalarNode) and node.kind in ("integer", "number")
        if not number or not SCIENTIFIC.fullmatch(text) or not 0 < float(text) < math.inf:
            long = text.isdecimal() and not INTEGER.fullmatch(text) and not text.startswith("0")
            hint = "write it with an exponent, such as 1e18" if long else _number_hint(node, text)
            raise BadValueError(f"expected a number above 0, got {quoted(text)}", hint)
        return float(text)

    def write(self, value: float) -> Any:
        """Return the number, as an int where ``read`` accepts its digits."""
        return int(value) if value.is_integer() and INTEGER.fullmatch(str(int(value))) else value

    def describe(self) -> Schema:
        return {"type": "number", "exclusiveMinimum": 0}


class Duration(Kind):
    """A span of time: `1h30m`, `90s`, `500ms`."""

    def __init__(self, *, minimum: timedelta = timedelta(0)) -> None:
        self._minimum = minimum

    def read(self, node: Node) -> timedelta:
        value = parse_duration(written(node, "a duration such as 10m"))
        if value < self._minimum:
            raise BadValueError(f"expected at least {format_duration(self._minimum)}, got {format_duration(value)}")
        return value

    def write(self, value: timedelta) -> Any:
        return format_duration(value)

    def describe(self) -> Schema:
        return {"type": "string", "pattern": DURATION_PATTERN, "minLength": 1}


class Memory(Kind):
    """An amount of memory, in bytes: `8GB` (10^9), `8GiB` (2^30)."""

    def __init__(self, *, minimum: int = 0) -> None:
        self._minimum = minimum

    def read(self, node: Node) -> int:
        text = written(node, "an amount of memory such as 8GB")
        value = parse_memory(text)
        if value < self._minimum:
            unit = f"a number alone is bytes: write {text}GB" if text.isdecimal() else "write 8GB or 8GiB"
            raise BadValueError(f"{quoted(text)} is less than {self._minimum} bytes", unit)
        return value

    def describe(self) -> Schema:
        number: Schema = {"type": "number", "minimum": self._minimum, "maximum": MAX_MEMORY_BYTES}
        return {"anyOf": [number, {"type": "string", "pattern": MEMORY_PATTERN}]}


class StepsOrTime(Kind):
    """A number of steps, or a duration with its unit."""

    def read(self, node: Node) -> int | timedelta:
        text = written(node, "a number of steps, or a duration such as 10m")
        if re.fullmatch(r"[-+]?[0-9]+(?:\.[0-9]*)?", text):
            return Whole(1, 10**12).read(node)
        return Duration(minimum=timedelta(seconds=1)).read(node)

    def write(self, value: int | timedelta) -> Any:
        return Duration().write(value) if isinstance(value, timedelta) else value

    def describe(self) -> Schema:
        return {"anyOf": [Whole(1, 10**12).describe(), Duration().describe()]}


class Json(Kind):
    """Any value that JSON can hold, for keys that another part of orch checks. Ambiguous YAML is refused."""

    def __init__(self, *, scalar: bool = False) -> None:
        self._scalar = scalar

    def read(self, node: Node) -> Any:
        found: list[tuple[Path, BadValueError]] = []
        value = self._value(node, (), found)
        if found:
            raise errors_below(found)
        return value

    def _value(self, node: Node, path: Path, found: list[tuple[Path, BadValueError]]) -> Any:
        if self._scalar and (is_null(node) or not isinstance(node, ScalarNode)):
            hint = "give a value" if is_null(node) else ""
            found.append((path, BadValueError(f"expected text, a number, or true or false, got {kind_of(node)}", hint)))
            return None
        if isinstance(node, ScalarNode):
            try:
                return _json_scalar(node)
            except BadValueError as error:
                found.append((path, error))
                return None
        if isinstance(node, ListNode):
            return [self._value(item, (*path, i), found) for i, item in enumerate(node.items)]
        return {key.text: self._value(value, (*path, key.text), found) for key, value in node.entries}

    def describe(self) -> Schema:
        return {"type": ["string", "number", "boolean"]} if self._scalar else {}


def errors_below(found: list[tuple[Path, BadValueError]]) -> ValueError:
    """Return one pydantic error for several bad values, each with its path below the value that is read."""
    from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

    return ValidationError.from_exception_data(
        "values",
        [
            InitErrorDetails(
                type=PydanticCustomError("bad_value", "{message}", {"message": e.message, "hint": e.hint}),
                loc=path,
                input=None,
            )
            for path, e in found
        ],
    )


class Null:
    """Reads `null`, or a key with nothing after it, as None."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        return cs.no_info_before_validator_function(lambda node: None if is_null(node) else node, handler(source))


def _number_hint(node: Node, text: str) -> str:
    if isinstance(node, ScalarNode) and node.kind == "text" and _NUMBER.fullmatch(text):
        return "remove the quotation marks"
    return "write it in decimal digits, such as 8" if any(c.isdigit() for c in text) else ""


def _json_scalar(node: ScalarNode) -> Any:
    text = node.text
    match node.kind:
        case "null":
            return None
        case "boolean" if text.lower() in ("true", "false"):
            return text.lower() == "true"
        case "integer" if INTEGER.fullmatch(text):
            return int(text)
        case "number" if SCIENTIFIC.fullmatch(text) and math.isfinite(float(text)):
            return float(text)
        case "date" | "text":
            return text
        case _:
            raise BadValueError(
                f"{quoted(text)} means different things to different readers of YAML",
                "write true, false or plain decimal digits, or put a text in quotation marks",
            )


_LAST_YEAR = 2999
_REMEDY = "write 2026-11-25T08:00, or with its zone 2026-11-25T08:00+01:00"


class Moment(Kind):
    """A date and a time of day in ISO 8601; without a zone, in the zone of the machine that reads it."""

    def read(self, node: Node) -> datetime:
        text = written(node, "a date and time")
        try:
            found = datetime.fromisoformat(text)
            moment = (found if found.tzinfo else found.astimezone()).astimezone(UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise BadValueError(f"expected a date and time, got {quoted(text)}", _REMEDY) from error
        if not 1970 < moment.year <= _LAST_YEAR or len(text) < len("2026-11-25T08"):
            raise BadValueError(f"expected a date and time, got {quoted(text)}", _REMEDY)
        return moment

    def write(self, value: datetime) -> str:
        return value.astimezone(UTC).isoformat()

    def describe(self) -> Schema:
        return {"type": "string", "minLength": 13, "maxLength": 64}


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
