# ruff: noqa: D102 - the base class documents the methods of a kind
"""The kinds of values in job.yaml, as annotations of the fields in `model`: how pydantic reads, writes and describes each.

A job file is a tree of nodes with their line and column. A single value is read from its node as written: the kind of its key decides what
`no` or `1_000` means. Records, lists and mappings split their node and pass the parts to pydantic, which does the rest: required and
unknown keys, all errors in one pass, with their places. Rules for single texts (names, patterns, globs, addresses) take the text and raise
BadValueError with the remedy. Must not name any key of job.yaml, and imports pydantic only for a schema, because a spec's classes are also
imported where nothing is parsed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from orchestrator.spec.problems import BadValueError, Path, nearest, quoted, shown
from orchestrator.spec.units import (
    DURATION_PATTERN,
    MAX_MEMORY_BYTES,
    MEMORY_PATTERN,
    format_duration,
    parse_duration,
    parse_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
    from pydantic_core import CoreSchema

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


NAME_PATTERN = r"[a-z](?:[-a-z0-9]{0,48}[a-z0-9])?"
NAME_REMEDY = "begin with a letter; then lower-case letters, digits and inner hyphens, at most 50 characters"
ENV_PATTERN = r"[A-Za-z_][A-Za-z0-9_]{0,254}"
ENV_REMEDY = "letters, digits and underscores, not beginning with a digit"
LABEL_PATTERN = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]{0,61}[A-Za-z0-9])?"
USER_PATTERN = r"[A-Za-z0-9_][-A-Za-z0-9_.@\\]{0,63}\$?"
"""A user in USER/NAME: an account's name, also of a directory service, or a number."""
_SET_BY_ORCH = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_[A-Z_]+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_[A-Z_]+|ORCH_[A-Z_]+|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
)
MAX_WIDE_SETS = 8
_ESCAPED = re.compile(r"\\[uUN]")
_SECRET = re.compile(r"(?i)(?:.*_)?(?:key|token)s?|.*(?:passw|secret|credential).*")


def looks_secret(name: str) -> bool:
    """Whether the name of a variable is one that keys, tokens and passwords have."""
    return _SECRET.fullmatch(name) is not None


def regular_expression(text: str) -> None:
    """Refuse a text that Python's `re` cannot compile, or only with much work: the daemon compiles it for every user.

    A set of characters with one beyond U+00FF is compiled to a table of all 65,536, which takes some milliseconds.
    """
    if (not text.isascii() or _ESCAPED.search(text)) and (sets := text.count("[")) > MAX_WIDE_SETS:
        raise BadValueError(
            f"{sets} sets of characters in a regular expression with characters beyond ASCII",
            f"write at most {MAX_WIDE_SETS} sets in [ ]",
        )
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError, Warning) as error:  # Warning: if warnings are errors
        raise BadValueError(
            f"not a regular expression: {shown(str(error))}", "the syntax is that of Python's re module"
        ) from error


def progress_expression(text: str) -> None:
    """Refuse a regular expression without a group for the step."""
    regular_expression(text)
    if re.compile(text).groups < 1:
        raise BadValueError("the pattern has no group for the step", r"write 'step (\d+)' or 'step (\d+)/(\d+)'")


def set_by_orch(name: str) -> bool:
    """Whether orch sets the variable for every rank."""
    return _SET_BY_ORCH.fullmatch(name) is not None


def user_variable(name: str) -> None:
    """Refuse the variables that orch sets for every rank."""
    if set_by_orch(name):
        raise BadValueError(
            "orch sets this variable itself", "remove it; resources say how many ranks and GPUs there are"
        )


def inside(pattern: str) -> None:
    """Refuse a glob that leaves the job's directory."""
    if pattern.startswith(("/", "~")):
        raise BadValueError(f"{quoted(pattern)} is not relative", "write it relative to working_dir, such as out/**")
    if ".." in pattern.replace("\\", "/").split("/"):
        raise BadValueError(f"{quoted(pattern)} leads out of working_dir", "remove the `..`")


def watched(pattern: str) -> None:
    """Refuse a relative glob that leaves the job's directory; an absolute one may be a shared filesystem."""
    if not pattern.startswith("/"):
        inside(pattern)


def local_directory(path: str) -> None:
    """Refuse URLs."""
    if "://" in path:
        raise BadValueError(f"{quoted(path)} is not a local directory", "fetch it first; it is copied at submission")


def storage(path: str) -> None:
    """Refuse a relative path, because each job gets a new directory of its own."""
    if path.startswith("~"):
        raise BadValueError(f"{quoted(path)} is not expanded", "write the whole path, beginning with /")
    if "://" not in path and not path.startswith("/"):
        raise BadValueError(
            f"{quoted(path)} is relative", "write a path beginning with /, or a URL such as s3://bucket/x"
        )
    scheme, url, rest = path.partition("://")
    if not url:
        return
    if scheme != "s3":
        instead = (
            f"write {rest}"
            if scheme == "file" and rest.startswith("/")
            else "write s3://bucket/x, or a path beginning with /"
        )
        raise BadValueError(f"{quoted(path)} is not a storage that orch can use", instead)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*(?:/[^/?#]+)*/?", rest) or ".." in rest.split("/"):
        raise BadValueError(f"{quoted(path)} names no bucket", "write s3://bucket, or s3://bucket/some/path")


def web_address(url: str) -> None:
    """Refuse a text that is not an http or https URL with a host."""
    if not re.fullmatch(r"https?://[^\s/?#]+(?:[/?#]\S*)?", url):
        raise BadValueError(f"{quoted(url)} is not a web address", "write https://host/path")


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


TAG = "\0"
"""Prefix of the steps in pydantic's error locations that are not steps in the file."""
STATED: Any = dataclasses.MISSING
"""Default of a key that has no default: the file must state it."""
STORED = "stored"
"""Context that pydantic gets when the data being read was accepted before."""


def _below(handler: GetJsonSchemaHandler, schema: CoreSchema) -> Schema:
    """Return the JSON Schema of a part. Pydantic's handler ignores the part's own schema unless another validator wraps it."""
    from pydantic_core import core_schema as cs

    return handler(cs.no_info_before_validator_function(_same, schema))


def _same(value: Any) -> Any:
    return value


class OneOf(Kind):
    """A word such as `auto`, or a single value of another kind, or a record."""

    def __init__(self, words: Mapping[str, Any], other: Kind, record: type[Record] | None = None) -> None:
        self._words = words
        self._other = other
        self.record = record

    def read(self, node: Node) -> Any:
        if isinstance(node, ScalarNode) and node.text in self._words:
            return self._words[node.text]
        try:
            return self._other.read(node)
        except BadValueError as error:
            words = " or ".join(f"`{word}`" for word in self._words)
            keys = (
                [key for key, field in keys_of(self.record).items() if field.default is STATED] if self.record else []
            )
            others = f"{words}, or {{{', '.join(f'{key}: ...' for key in keys)}}}" if keys else words
            hint = f"{error.hint}; {others} are also accepted" if error.hint else f"or {others}"
            raise BadValueError(error.message, hint) from None

    def write(self, value: Any) -> Any:
        for word, meant in self._words.items():
            if type(meant) is type(value) and meant == value:
                return word
        return self._other.write(value)

    def describe(self) -> Schema:
        return {"anyOf": [*({"const": word} for word in self._words), self._other.describe()]}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        single = super().__get_pydantic_core_schema__(source, handler)
        if self.record is None:
            return single
        of_record = handler.generate_schema(self.record)
        choices: dict[Any, CoreSchema] = {TAG + "record": of_record, TAG + "single": single}
        return cs.tagged_union_schema(choices, discriminator=_record_or_single)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        described = self.describe()
        if schema["type"] == "tagged-union":
            described["anyOf"].append(_below(handler, schema["choices"][TAG + "record"]))
        return described


def _record_or_single(value: Any) -> str:
    return TAG + ("record" if isinstance(value, MapNode | Record) else "single")


class Listed:
    """A list of values of one kind. `null` is the empty list."""

    def __init__(self, maximum: int = 1000, *, unique: bool = False) -> None:
        self._maximum = maximum
        self._unique = unique

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        read = cs.no_info_before_validator_function(self._items, handler(source))
        return cs.no_info_after_validator_function(_no_second, read) if self._unique else read

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        unique = {"uniqueItems": True} if self._unique else {}
        return {**handler(schema), "type": ["array", "null"], "maxItems": self._maximum, **unique}

    def _items(self, node: Node) -> list[Node]:
        if is_null(node):
            return []
        if not isinstance(node, ListNode):
            hint = f"write [{shown(node.text)}]" if isinstance(node, ScalarNode) else ""
            raise BadValueError(f"expected a list, got {kind_of(node)}", hint)
        if len(node.items) > self._maximum:
            raise BadValueError(f"a list of {len(node.items)} items", f"at most {self._maximum}")
        return list(node.items)


def _no_second(values: tuple[Any, ...]) -> tuple[Any, ...]:
    found: list[tuple[Path, BadValueError]] = [
        ((index,), BadValueError(f"{quoted(str(value))} occurs twice in the list", "remove one"))
        for index, value in enumerate(values)
        if value in values[:index]
    ]
    if found:
        raise errors_below(found)
    return values


class Keyed:
    """A mapping with keys of the user's own. `null` is the empty one."""

    def __init__(self, maximum: int = 1000) -> None:
        self._maximum = maximum

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        keys, values = (handler.generate_schema(argument) for argument in get_args(source))
        return cs.no_info_before_validator_function(self._entries, cs.dict_schema(keys, values))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        table: Any = schema["schema"]
        return {
            "type": ["object", "null"],
            "propertyNames": {**_below(handler, table["keys_schema"]), "type": "string"},
            "additionalProperties": _below(handler, table["values_schema"]),
            "maxProperties": self._maximum,
        }

    def _entries(self, node: Node) -> dict[str, Node]:
        if is_null(node):
            return {}
        if not isinstance(node, MapNode):
            raise BadValueError(f"expected a mapping, got {kind_of(node)}", "write {NAME: value}")
        if len(node.entries) > self._maximum:
            raise BadValueError(f"a mapping of {len(node.entries)} keys", f"at most {self._maximum}")
        return {key.text: value for key, value in node.entries}


class Given:
    """The keys of a record that the file gives, each a single value, as JSON; the other keys are left to the script.

    With pydantic's context ``STORED`` nothing is checked, so that a value that was accepted once stays readable.
    """

    def __init__(self, record: type[Record]) -> None:
        self.record = record

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        fields = {
            name: cs.typed_dict_field(handler.generate_schema(key.annotation), required=False)
            for name, key in keys_of(self.record).items()
        }
        return cs.with_info_wrap_validator_function(
            self._given,
            cs.typed_dict_schema(fields, extra_behavior="forbid"),
            serialization=cs.plain_serializer_function_ser_schema(dict),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        described = {**handler(schema), "type": ["object", "null"], "additionalProperties": False}
        for name, key in keys_of(self.record).items():
            described["properties"][name]["default"] = default_form(key)
        return described

    def _given(self, node: Node, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if is_null(node):
            return {}
        if not isinstance(node, MapNode):
            raise BadValueError(f"expected a mapping, got {kind_of(node)}", "write {NAME: value}")
        if info.context == STORED:
            return Json().read(node)
        values = check({key.text: value for key, value in node.entries})
        return {name: key.write(values[name]) for name, key in keys_of(self.record).items() if name in values}


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One entry of a record: the name of its dataclass field, its meaning, its default and its annotation."""

    attribute: str
    doc: Doc
    default: Any
    annotation: Any

    @property
    def kind(self) -> Kind | None:
        """The first kind in the annotation; None when there is none."""
        return next((part for part in _parts(self.annotation) if isinstance(part, Kind)), None)

    def read(self, node: Node) -> Any:
        """Read a single value as pydantic does, without importing pydantic. Raises BadValueError."""
        if is_null(node) and any(isinstance(part, Null) for part in _parts(self.annotation)):
            return None
        return self._single().read(node)

    def write(self, value: Any) -> Any:
        """Return the canonical JSON form of a single value."""
        return None if value is None else self._single().write(value)

    def _single(self) -> Kind:
        if self.kind is None:
            raise TypeError(f"{self.attribute} is not a single value")
        return self.kind


def _parts(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


class Record:
    """Base of a mapping with fixed keys: a frozen dataclass whose field defaults are the defaults of the keys."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    shorthand: ClassVar[str] = ""

    @classmethod
    def key(cls, attribute: str) -> str:
        """Return the key of a field."""
        named = cls.__pydantic_config__.get("alias_generator")
        return str(named(attribute)) if named else attribute

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema as cs

        return cs.no_info_before_validator_function(cls._entries, handler(source))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        described = handler(schema)
        whole = handler.resolve_ref_schema(described)
        whole["type"] = "object" if whole.get("required") else ["object", "null"]
        for name, key in keys_of(cls).items():
            if key.default is not STATED:
                whole["properties"][name]["default"] = default_form(key)
        return described

    @classmethod
    def _entries(cls, node: Any) -> Any:
        if isinstance(node, MapNode):
            return {key.text: value for key, value in node.entries}
        if is_null(node):
            return {}
        if isinstance(node, cls):
            return node
        keys = list(keys_of(cls))
        listed = ", ".join(keys) if len(keys) < 8 else ", ".join([*keys[:4], "..."])
        raise BadValueError(f"expected a mapping with {listed}, got {kind_of(node)}", cls.shorthand)


def keys_of(record: type[Record]) -> dict[str, Key]:
    """Return the keys of a record, in the order of its fields."""
    hints = get_type_hints(record, include_extras=True)
    return {record.key(f.name): _key(f, hints[f.name]) for f in dataclasses.fields(record)}  # type: ignore[arg-type]  # every record is a dataclass


def _key(field: dataclasses.Field[Any], annotation: Any) -> Key:
    doc = next((extra for extra in get_args(annotation) if isinstance(extra, Doc)), Doc(""))
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Key(attribute=field.name, doc=doc, default=default, annotation=annotation)


def walk(record: type[Record], prefix: str = "") -> Iterator[tuple[str, type[Record], Key]]:
    """Yield every fixed key below a record: its full path (`depends_on[].job`), its record, and its definition."""
    for name, key in keys_of(record).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, record, key
        for below, steps in _records_in(key.annotation):
            yield from walk(below, path + steps)


def _records_in(annotation: Any) -> Iterator[tuple[type[Record], str]]:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        yield annotation, ""
    for argument in get_args(annotation):
        if isinstance(argument, Given):
            yield argument.record, ""
        steps = "[]" if get_origin(annotation) is tuple else ""
        yield from ((found, steps + more) for found, more in _records_in(argument))


def default_form(key: Key) -> Any:
    """Return a key's default in the form that a job file has."""
    from pydantic import TypeAdapter

    return TypeAdapter(key.annotation).dump_python(key.default, mode="json", by_alias=True)
