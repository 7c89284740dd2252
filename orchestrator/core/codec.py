"""Converts records to JSON-ready values and back: the one codec of stored values. Pure.

cattrs converts the dataclasses by their declared types, so a new field or record needs no code here. A value of the
wrong type is kept as it was read, and ``conformance`` replaces it: one module decides what is valid, for stored records
and for reports of ranks. An unknown key is refused: the record of a newer version must not lose a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from cattrs import ClassValidationError, Converter, IterableValidationError, transform_error
from cattrs.gen import make_dict_unstructure_fn, override
from cattrs.v import format_exception

from orchestrator.core.conformance import repaired, repaired_all
from orchestrator.core.errors import CoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_MOST_LISTED = 5
_SIMPLE = (int, float, str, bool)


class RecordError(CoreError):
    """A stored record is damaged, or a newer version of orch wrote it; the message names the unreadable part."""


def to_plain(record: Any) -> dict[str, Any]:
    """Return the record's fields as JSON values."""
    plain: dict[str, Any] = _CONVERTER.unstructure(record)
    return plain


def from_plain(cls: type[T], values: Mapping[str, Any]) -> tuple[T, tuple[str, ...]]:
    """Return the record of such values, and the names of the fields that held invalid values and now have defaults.

    A missing key takes its default. Raises RecordError for a missing key without one, an unknown key, and an invalid
    value of an enumeration or of a class with its own form.
    """
    try:
        record = _CONVERTER.structure(values, cls)
    except (ClassValidationError, IterableValidationError) as error:
        found = transform_error(error, format_exception=_reason)
        more = [f"{len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
        raise RecordError(f"{cls.__name__}: {'; '.join([*found[:_MOST_LISTED], *more])}") from error
    below: tuple[str, ...] = ()
    for name in _record_lists(cls):  # type: ignore[arg-type]  # a class is hashable
        items = getattr(record, name)
        if not (isinstance(items, (tuple, list)) and all(map(is_dataclass, items))):
            continue
        whole, names = repaired_all(name, items)
        if names:
            kept: Any = type(items)(whole)
            record, below = replace(record, **{name: kept}), (*below, *names)  # type: ignore[type-var]  # every record is a dataclass
    record, own = repaired(record)
    return record, (*own, *below)


def leave_out(cls: type[Any], *names: str) -> None:
    """Exclude these fields from the plain form of the class and its subclasses."""

    def writer(of: type[Any]) -> Callable[[Any], dict[str, Any]]:
        omitted: Any = {name: override(omit=True) for name in names}
        return make_dict_unstructure_fn(of, _CONVERTER, **omitted)

    _CONVERTER.register_unstructure_hook_factory(lambda of: isinstance(of, type) and issubclass(of, cls), writer)


def use_form(cls: type[T], write: Callable[[T], Any], read: Callable[[Any], T]) -> None:
    """Convert a class by its own functions."""
    _CONVERTER.register_unstructure_hook(cls, write)
    _CONVERTER.register_structure_hook(cls, lambda value, _: read(value))


def _reason(error: BaseException, kind: type[Any] | None) -> str:
    return str(error) if type(error) is ValueError or isinstance(error, RecordError) else format_exception(error, kind)


@cache
def _record_lists(cls: Any) -> tuple[str, ...]:
    """Return the fields of a class that hold tuples of records."""
    hints = get_type_hints(cls)
    tuples = [f.name for f in fields(cls) if _is_list(hints[f.name])]
    return tuple(name for name in tuples if is_dataclass(get_args(hints[name])[0]))


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})
    for kind in _SIMPLE:
        converter.register_structure_hook(kind, lambda value, _: value)
    converter.register_structure_hook(StrEnum, lambda value, kind: kind(value))
    converter.register_structure_hook_func(_is_mapping, lambda value, _: value)
    converter.register_structure_hook_factory(_is_list, lambda kind: _list_reader(converter, kind))
    return converter


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) in (Mapping, dict)


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, list)


def _list_reader(converter: Converter, kind: Any) -> Callable[[Any, Any], Any]:
    """Convert a list to the declared tuple or list; other values stay, for ``conformance`` to replace."""
    make, item = get_origin(kind), get_args(kind)[0]
    if item in _SIMPLE:
        return lambda value, _: make(value) if isinstance(value, list) else value
    return lambda value, _: make(converter.structure(v, item) for v in value) if isinstance(value, list) else value


_CONVERTER = _converter()
