# ruff: noqa: D102 - the base class documents the methods of a kind
"""Records, lists and mappings of job.yaml, as annotations and base of the classes in `model`; pydantic reads their contents.

Each splits its node and passes the parts to pydantic, which finds all errors in one pass, with their places. Must not
name any key of job.yaml, and imports pydantic only for a schema.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

from orchestrator.spec.fields.kinds import Doc, Json, Kind, Null, Schema, errors_below
from orchestrator.spec.fields.nodes import ListNode, MapNode, Node, ScalarNode, is_null, kind_of
from orchestrator.spec.problems import BadValueError, Path, quoted, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
    from pydantic_core import CoreSchema

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
