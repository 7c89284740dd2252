"""Checks a dataclass's values against its fields' declarations: types, finite numbers, ranges, lengths. Pure.

Reports of ranks are checked with it: an invalid value would otherwise fail later in the work for all jobs. Only the standard library is
imported, because a rank's keeper uses it too; the records of the store are ``codec.py``'s.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from math import isfinite
from typing import Any, Final, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_TEXT: Final = 1024 * 1024
MAX_ITEMS: Final = 100_000
MAX_INTEGER: Final = 2**63 - 1
LATEST_TIME: Final = 1e11
"""Seconds since the epoch: the year 5138. Later times cannot be shown as a date everywhere."""

_TIMES: Final = frozenset({"at", "deadline", "not_before", "fenced_until", "state_since"})


# Modules of records import these for their annotations only.
_NAMES: Final[dict[str, Any]] = {"Mapping": Mapping, "Sequence": Sequence, "Any": Any, "JobId": str}

R = TypeVar("R")
Check = Callable[[Any], bool]


class _Rule(NamedTuple):
    field: Field[Any]
    check: Check
    neutral: Any


_UNRESOLVED: Final = object()
_KNOWN: Final[dict[type[Any], tuple[_Rule, ...]]] = {}


def misfits(record: Any) -> tuple[str, ...]:
    """Return the names of the dataclass's fields with invalid values, in order."""
    rules = _rules(type(record))
    return tuple([field.name for field, check, _ in rules if not check(getattr(record, field.name, MISSING))])


def repaired(record: R) -> tuple[R, tuple[str, ...]]:
    """Return the dataclass with defaults in place of invalid values, and the names of those fields.

    A required field gets the neutral value of its type. Raises TypeError where there is none, as for an enum.
    """
    changes = {}
    for rule in _rules(type(record)):
        if not rule.check(getattr(record, rule.field.name, MISSING)):
            changes[rule.field.name] = _default(rule)
    return (replace(record, **changes) if changes else record, tuple(changes))  # type: ignore[type-var]  # a dataclass


def is_count(value: object, most: int = MAX_INTEGER) -> bool:
    """Whether the value is a whole number from 0 to ``most``."""
    return type(value) is int and 0 <= value <= most


def is_finite(value: object, least: float = -MAX_INTEGER, most: float = MAX_INTEGER) -> bool:
    """Whether the value is a number from ``least`` to ``most``."""
    # The range first: isfinite() raises OverflowError for whole numbers that no float can hold.
    return (type(value) is float or type(value) is int) and least <= value <= most and isfinite(value)


def is_number(value: object) -> bool:
    """Whether the value is a number, NaN and infinity included: a script's metric may be one."""
    return type(value) is float or type(value) is int


def is_time(value: object) -> bool:
    """Whether the value is a time in seconds since the epoch."""
    return is_finite(value, 0, LATEST_TIME)


def is_text(value: object, most: int = MAX_TEXT) -> bool:
    """Whether the value is a text of at most ``most`` characters."""
    return type(value) is str and len(value) <= most


def _default(rule: _Rule) -> Any:
    if rule.field.default is not MISSING:
        return rule.field.default
    if rule.field.default_factory is not MISSING:
        return rule.field.default_factory()
    if rule.neutral is MISSING:
        raise TypeError(f"{rule.field.name} has no value, and no default can replace it")
    return rule.neutral


def _rules(cls: type[Any]) -> tuple[_Rule, ...]:
    rules = _KNOWN.get(cls)
    if rules is None:
        rules = _KNOWN[cls] = tuple(_rule(field, _hint(cls, field)) for field in fields(cls))
    return rules


def unchecked(cls: type[Any]) -> tuple[str, ...]:
    """Return the dataclass's fields whose annotation cannot be resolved, so that every value passes: a test keeps this empty."""
    return tuple(field.name for field in fields(cls) if _hint(cls, field) is _UNRESOLVED)


def _hint(cls: type[Any], field: Field[Any]) -> Any:
    """Return the field's type. A name that a module imports for annotations only must not cause an error."""
    alone = type(cls.__name__, (), {"__annotations__": {field.name: field.type}, "__module__": cls.__module__})
    try:
        return get_type_hints(alone, localns=_NAMES)[field.name]
    except NameError:
        return _UNRESOLVED


def _rule(field: Field[Any], hint: Any) -> _Rule:
    is_moment = field.name in _TIMES or field.name.endswith("_at")
    return _Rule(field, _check(hint, is_time if is_moment else is_finite), _neutral(hint))


def _neutral(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return None if type(None) in get_args(hint) else MISSING
    if get_origin(hint) in (tuple, list):
        return get_origin(hint)()
    if hint is _UNRESOLVED:
        return MISSING
    if hint in (int, float, str, bool):
        return hint()
    return MISSING


def _check(hint: Any, number: Check = is_finite) -> Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [_check(option, number) for option in arguments if option is not type(None)]
        if len(options) == 1 and len(options) < len(arguments):
            (only,) = options
            return lambda value: value is None or only(value)
        options = [_check(option, number) for option in arguments]
        return lambda value: any(option(value) for option in options)
    if origin in (tuple, list):
        return _items(origin, _check(arguments[0], number))
    if origin in (Mapping, dict):
        return _pairs(_check(arguments[0]), _check(arguments[1], is_number))
    return _simple(hint, number)


def _simple(hint: Any, number: Check) -> Check:
    if hint is Any or hint is _UNRESOLVED:
        return lambda _: True
    if hint is float:
        return number
    if hint is int:
        return lambda value: type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER
    if hint is str:
        return is_text
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: isinstance(value, hint) and not misfits(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value: isinstance(value, hint)
    return lambda value: isinstance(value, hint)


def _items(kind: type[Any], check: Check) -> Check:
    return lambda value: type(value) is kind and len(value) <= MAX_ITEMS and all(map(check, value))


def _pairs(key: Check, item: Check) -> Check:
    return lambda value: (
        isinstance(value, Mapping) and len(value) <= MAX_ITEMS and all(key(k) and item(v) for k, v in value.items())
    )
