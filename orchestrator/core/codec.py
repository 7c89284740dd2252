"""The one codec of what is stored, and of what crosses a process boundary: a record's class is its only description. Pure.

Decoding is the validation. msgspec reads and writes the classes by their declared types, so a new field or record needs no code here.
What it cannot decode (a wrong type, a value out of range, an unknown key of a newer version) is refused as a whole; a report whose
other values still count is read with ``usable``.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, Union, dataclass_transform, get_args, get_origin

import msgspec
from msgspec import Meta

from orchestrator.core.errors import CoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
R = TypeVar("R", bound="Record")

MAX_TEXT: Final = 1024 * 1024
MAX_INTEGER: Final = 2**63 - 1
LATEST_TIME: Final = 1e11
"""Seconds since the epoch: the year 5138. Later times cannot be shown as a date everywhere."""

Integer = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""A whole number that SQLite can hold."""
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Number = Annotated[float, Meta(ge=-float(MAX_INTEGER), le=float(MAX_INTEGER))]
"""A finite number."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A duration."""
Time = Annotated[float, Meta(ge=0.0, le=LATEST_TIME)]
"""Seconds since the epoch."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class RecordError(CoreError):
    """A stored record is damaged, or a newer version of orch wrote it; the message names the unreadable part."""


class _RecordMeta(msgspec.StructMeta):
    """Makes the fields of every record given by name: ``kw_only`` of a base class says nothing about those of its subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **config: Any) -> Any:
        return super().__new__(cls, name, bases, body, **{"kw_only": True, **config})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, metaclass=_RecordMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records that are stored: immutable, with fields that are given by name."""


class Message(Record, forbid_unknown_fields=False):
    """Base of what one process sends another: keys that a newer version adds are ignored."""


class Kind:
    """The name of a record's class in the store and in the API: its ``tag``."""

    def __get__(self, instance: object, owner: type[Any]) -> str:
        """Return the tag; of a base class, its name."""
        kind: str = owner.__struct_config__.tag
        return kind


_FORMS: Final[dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {}


def use_form(cls: type[T], write: Callable[[T], Any], read: Callable[[Any], T]) -> None:
    """Convert a class that is no record by its own functions."""
    _FORMS[cls] = (write, read)


def to_plain(record: Any) -> Any:
    """Return a record, or a dataclass of records, as JSON-ready values. Raises TypeError and ValueError for values that are none."""
    return msgspec.to_builtins(record, enc_hook=_write)


def from_plain(cls: type[T], values: Any) -> T:
    """Return the record of such values. Raises RecordError for everything that the class does not allow."""
    try:
        return msgspec.convert(values, cls, dec_hook=_read)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise RecordError(f"{cls.__name__}: {error}") from error


def to_bytes(record: Any) -> bytes:
    """Return a message: msgpack, or JSON for texts that are no UTF-8 (an environment, file names), which msgpack cannot hold."""
    try:
        return msgspec.msgpack.encode(record, enc_hook=_write)
    except UnicodeEncodeError:
        return json.dumps(to_plain(record)).encode("ascii")


def from_bytes(cls: type[T], data: bytes) -> T:
    """Return the record of a message. Raises RecordError for everything that the class does not allow."""
    try:
        if data[:1] == b"{":  # the first byte of an object in msgpack is another one
            return from_plain(cls, json.loads(data))
        return msgspec.msgpack.decode(data, type=cls, dec_hook=_read)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{cls.__name__}: {error}") from error


def usable_from_bytes(cls: type[R], data: bytes) -> R:
    """As ``from_bytes``, with ``usable`` for what the class does not allow. Raises RecordError for what is no object."""
    try:
        return from_bytes(cls, data)
    except RecordError:
        values = from_bytes(dict[str, Any], data)
        return usable(cls, values)[0]


def misfits(record: Record) -> tuple[str, ...]:
    """Return the names of the fields whose values would not be read back as they are."""
    return tuple(f.encode_name for f in msgspec.structs.fields(record) if not _fits(getattr(record, f.name), f.type))


def usable(cls: type[R], values: Mapping[str, Any]) -> tuple[R, tuple[str, ...]]:
    """Return a record of the values that fit their fields, and the names of the others; unknown keys are ignored.

    A field without a fitting value has its default, or None, 0 or an empty text or tuple. Of a record within, the values are
    taken in the same way. A record with a field ``unusable`` has the names itself. Raises RecordError for a field
    for which no value can stand.
    """
    try:
        return msgspec.convert(values, cls, dec_hook=_read), ()
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass
    kept: dict[str, Any] = {}
    names: list[str] = []
    for field in msgspec.structs.fields(cls):
        name = field.encode_name
        if name not in values and not field.required:
            continue
        try:
            kept[field.name] = msgspec.convert(values[name], field.type, dec_hook=_read)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
            inner = _usable_within(field.type, values.get(name))
            if inner is not None:
                kept[field.name] = inner[0]
                names += [f"{name}.{each}" for each in inner[1]]
                continue
            names.append(name)
            if field.required:
                kept[field.name] = _neutral(cls, name, field.type)
    record = cls(**kept)
    if names and "unusable" in cls.__struct_fields__:
        return msgspec.structs.replace(record, unusable=(*record.unusable, *names)), ()  # type: ignore[attr-defined]
    return record, tuple(names)


def _usable_within(hint: Any, value: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return what is usable of a field that holds a record or a tuple of records; None for another field or value."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next((each for each in get_args(hint) if each is not type(None)), None)
    several = get_origin(hint) is tuple
    kind = get_args(hint)[0] if several else hint
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return None
    if several:
        inner = [_usable_within(kind, each) for each in value] if isinstance(value, list) else [None]
        names = dict.fromkeys(name for each in inner for name in (("?",) if each is None else each[1]))
        return tuple(each[0] for each in inner if each is not None), tuple(names)
    try:
        return usable(kind, value) if isinstance(value, Mapping) else None
    except RecordError:
        return None


def _neutral(cls: type[Any], name: str, hint: Any) -> Any:
    for value in (None, 0, "", ()):
        if _fits(value, hint):
            return value
    raise RecordError(f"{cls.__name__}: no value of {name}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    try:
        return bool(msgspec.convert(to_plain(value), hint, dec_hook=_read) == value)
    except (TypeError, ValueError, OverflowError, RecursionError, NotImplementedError):
        return False


def _write(value: Any) -> Any:
    form = _FORMS.get(type(value))
    if form is None:
        raise TypeError(f"{type(value).__name__} cannot be stored")
    return form[0](value)


def _read(cls: type[Any], value: Any) -> Any:
    return _FORMS[cls][1](value)
