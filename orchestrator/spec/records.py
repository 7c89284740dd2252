# ruff: noqa: D102 - the base class documents the three methods
"""The shapes of collections: lists, free tables, records with fixed keys, and a choice between shapes.

A collection never gives up on account of a part: it reports the part, leaves it out (a record takes the default),
and goes on, so that one reading finds everything. Must not know any key of job.yaml.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.spec.document import ListNode, MapNode, Node, ScalarNode, kind_of
from orchestrator.spec.problems import BadValueError, Path, Problem, quoted, shown
from orchestrator.spec.shapes import Maybe, Schema, Shape, Text, Word, is_null, located

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.spec.model import JsonValue

    UnknownKey = Callable[[Path, str, Sequence[str]], BadValueError]
    """Explains a key that a record does not have: the record's path, the key, the record's keys."""

T = TypeVar("T")

REQUIRED: Any = dataclasses.MISSING
"""The default of a key that has none."""


class ReportedError(BadValueError):
    """A record cannot be made because a required part is wrong; the part has been reported already."""


class Items(Shape[tuple[T, ...]]):
    """A list of values of one shape. `null` is the empty list."""

    def __init__(self, item: Shape[T], *, maximum: int = 1000, unique: bool = False) -> None:
        self.item = item
        self._maximum = maximum
        self._unique = unique

    def read(self, node: Node, path: Path, problems: list[Problem]) -> tuple[T, ...]:
        if is_null(node):
            return ()
        if not isinstance(node, ListNode):
            hint = f"write [{shown(node.text)}]" if isinstance(node, ScalarNode) else ""
            raise BadValueError(f"expected a list, got {kind_of(node)}", hint)
        if len(node.items) > self._maximum:
            raise BadValueError(f"a list of {len(node.items)} items", f"at most {self._maximum}")
        values: list[T] = []
        for index, item in enumerate(node.items):
            place = (*path, index)
            try:
                value = self.item.read(item, place, problems)
                if self._unique and value in values:
                    raise BadValueError(f"{quoted(str(value))} stands twice in the list", "remove one")  # noqa: TRY301 - told with the place, like every other
                values.append(value)
            except BadValueError as error:
                report(error, item, place, problems)
        return tuple(values)

    def write(self, value: tuple[T, ...]) -> JsonValue:
        return [self.item.write(item) for item in value]

    def schema(self) -> Schema:
        schema: Schema = {"type": ["array", "null"], "items": self.item.schema(), "maxItems": self._maximum}
        if self._unique:
            schema["uniqueItems"] = True
        return schema


class Table(Shape["Mapping[str, T]"]):
    """A mapping with keys of the user's own. `null` is the empty one."""

    def __init__(self, key: Text, value: Shape[T], *, maximum: int = 1000) -> None:
        self._key = key
        self.value = value
        self._maximum = maximum

    def read(self, node: Node, path: Path, problems: list[Problem]) -> Mapping[str, T]:
        if is_null(node):
            return {}
        if not isinstance(node, MapNode):
            raise BadValueError(f"expected a mapping, got {kind_of(node)}", "write {NAME: value}")
        if len(node.entries) > self._maximum:
            raise BadValueError(f"a mapping of {len(node.entries)} keys", f"at most {self._maximum}")
        values: dict[str, T] = {}
        for key, value in node.entries:
            place = (*path, key.text)
            try:
                # A key is text whatever YAML takes it for: nobody quotes `on:`.
                self._key.read(dataclasses.replace(key, kind="text"), place, problems)
            except BadValueError as error:
                report(error, key, place, problems)
                continue
            try:
                values[key.text] = self.value.read(value, place, problems)
            except BadValueError as error:
                report(error, value, place, problems)
        return values

    def write(self, value: Mapping[str, T]) -> JsonValue:
        return {key: self.value.write(item) for key, item in value.items()}

    def schema(self) -> Schema:
        names = {**self._key.schema(), "type": "string"}
        return {
            "type": ["object", "null"],
            "propertyNames": names,
            "additionalProperties": self.value.schema(),
            "maxProperties": self._maximum,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of a record.

    `attribute` names the dataclass field where it differs from the key. `stand_in` takes the place of a required
    value that is wrong, so that the rest can still be checked; without one the record is given up.
    """

    shape: Shape[Any]
    doc: str
    attribute: str = ""
    stand_in: Any = REQUIRED


class Record(Shape[T]):
    """A mapping with fixed keys, read into a frozen dataclass, whose defaults are the defaults."""

    def __init__(self, make: type[T], fields: Mapping[str, Field], *, unknown: UnknownKey, shorthand: str = "") -> None:
        self._make = make
        self.fields = dict(fields)
        self._unknown = unknown
        self._shorthand = shorthand
        self._defaults = _defaults(make)

    def attribute(self, key: str) -> str:
        """Name the dataclass field that holds a key's value."""
        return self.fields[key].attribute or key

    def default(self, key: str) -> Any:
        """Return a key's default, or REQUIRED."""
        return self._defaults[self.attribute(key)]

    def read(self, node: Node, path: Path, problems: list[Problem]) -> T:
        if not isinstance(node, MapNode) and not is_null(node):
            raise BadValueError(f"expected a mapping with {self._listed()}, got {kind_of(node)}", self._shorthand)
        values: dict[str, Any] = {}
        broken: set[str] = set()
        for key, value in node.entries if isinstance(node, MapNode) else ():
            place = (*path, key.text)
            field = self.fields.get(key.text)
            try:
                if field is None:
                    report(self._unknown(path, key.text, list(self.fields)), key, place, problems)
                else:
                    values[self.attribute(key.text)] = field.shape.read(value, place, problems)
            except BadValueError as error:
                broken.add(key.text)
                report(error, value, place, problems)
        self._complete(values, broken, node, path, problems)
        return self._make(**values)

    def _complete(
        self, values: dict[str, Any], broken: set[str], node: Node, path: Path, problems: list[Problem]
    ) -> None:
        """Report required keys that are missing, and put stand-ins where there is nothing to take."""
        given_up = False
        for key, field in self.fields.items():
            if self.attribute(key) in values or self.default(key) is not REQUIRED:
                continue
            if key not in broken:
                report(BadValueError("is required", field.doc), node, (*path, key), problems)
            if field.stand_in is REQUIRED:
                given_up = True
            else:
                values[self.attribute(key)] = field.stand_in
        if given_up:
            raise ReportedError("a required key is missing or wrong")

    def _listed(self) -> str:
        keys = list(self.fields)
        return ", ".join(keys) if len(keys) < 8 else ", ".join([*keys[:4], "..."])

    def write(self, value: T) -> JsonValue:
        return {key: field.shape.write(getattr(value, self.attribute(key))) for key, field in self.fields.items()}

    def schema(self) -> Schema:
        properties: Schema = {}
        required: list[JsonValue] = []
        for key, field in self.fields.items():
            described: Schema = {"description": field.doc, **field.shape.schema()}
            default = self.default(key)
            if default is REQUIRED:
                required.append(key)
            else:
                described["default"] = field.shape.write(default)
            properties[key] = described
        schema: Schema = {
            "type": "object" if required else ["object", "null"],
            "properties": properties,
            "additionalProperties": False,
        }
        if required:
            schema["required"] = required
        return schema


class OneOf(Shape[Any]):
    """A word such as `auto`, or a mapping of one shape, or a single value of another."""

    def __init__(self, *words: Word[Any], scalar: Shape[Any], mapping: Record[Any] | None = None) -> None:
        self._words = words
        self._scalar = scalar
        self.mapping = mapping

    def read(self, node: Node, path: Path, problems: list[Problem]) -> Any:
        if isinstance(node, MapNode) and self.mapping is not None:
            return self.mapping.read(node, path, problems)
        for word in self._words:
            if isinstance(node, ScalarNode) and node.text == word.word:
                return word.value
        try:
            return self._scalar.read(node, path, problems)
        except BadValueError as error:
            words = " or ".join(f"`{word.word}`" for word in self._words)
            keys = [key for key in self.mapping.fields if self.mapping.default(key) is REQUIRED] if self.mapping else []
            others = f"{words}, or {{{', '.join(f'{key}: ...' for key in keys)}}}" if keys else words
            raise BadValueError(
                error.message, f"{error.hint}; {others} also go" if error.hint else f"or {others}"
            ) from None

    def write(self, value: Any) -> JsonValue:
        for word in self._words:
            if type(word.value) is type(value) and word.value == value:
                return word.word
        shape = self.mapping if self.mapping is not None and dataclasses.is_dataclass(value) else self._scalar
        return shape.write(value)

    def schema(self) -> Schema:
        choices: list[JsonValue] = [word.schema() for word in self._words]
        choices.append(self._scalar.schema())
        if self.mapping is not None:
            choices.append(self.mapping.schema())
        return {"anyOf": choices}


def report(error: BadValueError, node: Node, path: Path, problems: list[Problem]) -> None:
    """Add a bad value to the problems, unless its parts have been added already."""
    if not isinstance(error, ReportedError):
        problems.append(located(error, node, path))


def walk(shape: Shape[Any], prefix: str = "") -> Iterator[tuple[str, Record[Any], str]]:
    """List every fixed key below a shape: its full path (`depends_on[].job`), its record, its own name."""
    match shape:
        case Maybe():
            yield from walk(shape.inner, prefix)
        case Items():
            yield from walk(shape.item, f"{prefix}[]")
        case OneOf():
            if shape.mapping is not None:
                yield from walk(shape.mapping, prefix)
        case Record():
            for key, field in shape.fields.items():
                path = f"{prefix}.{key}" if prefix else key
                yield path, shape, key
                yield from walk(field.shape, path)


def _defaults(make: type) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(make):
        factory = field.default_factory
        defaults[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return defaults
