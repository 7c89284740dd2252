"""The one codec of stored values: a record's class is its only description, and decoding is the validation. Pure.

msgspec reads and writes the classes by their declared types, so a new field or record needs no code here. What it cannot decode (a
wrong type, a value out of range, an unknown key of a newer version) is refused as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, dataclass_transform

import msgspec
from msgspec import Meta

from orchestrator.core.conformance import LATEST_TIME, MAX_INTEGER, MAX_TEXT
from orchestrator.core.errors import CoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
R = TypeVar("R", bound="Record")

Integer = Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
"""A whole number that SQLite can hold."""
Number = Annotated[float, Meta(ge=-float(MAX_INTEGER), le=float(MAX_INTEGER))]
"""A finite number."""
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


def misfits(record: Record) -> tuple[str, ...]:
    """Return the names of the fields whose values would not be read back as they are: they came from a rank, unchecked."""
    return tuple(f.encode_name for f in msgspec.structs.fields(record) if not _fits(getattr(record, f.name), f.type))


def repaired(record: R) -> R:
    """Return the record with defaults in place of such values, or with None, 0 or an empty text in a field without a default."""
    changes: dict[str, Any] = {}
    for f in msgspec.structs.fields(record):
        if _fits(getattr(record, f.name), f.type):
            continue
        if f.default is not msgspec.NODEFAULT:
            changes[f.name] = f.default
        else:
            changes[f.name] = next(value for value in (None, 0, "", ()) if _fits(value, f.type))
    return msgspec.structs.replace(record, **changes) if changes else record


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
