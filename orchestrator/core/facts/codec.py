"""Converts facts to JSON-ready values and back: an object with the fact's ``kind`` and the fields without default values.

A fact that cannot be read becomes an ``UnreadableFact``, so that its record opens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

from orchestrator.core.codec import use_form
from orchestrator.core.conformance import misfits
from orchestrator.core.facts import (
    findings,
    gangs,
    gpus,
    hangs,
    memory,
    nodes,
    notes,
    rank_ends,
    reasons,
    requesters,
)
from orchestrator.core.facts.fact import Fact, UnreadableFact

if TYPE_CHECKING:
    from types import ModuleType

_MODULES: Final[tuple[ModuleType, ...]] = (
    findings,
    gangs,
    gpus,
    hangs,
    memory,
    nodes,
    notes,
    rank_ends,
    reasons,
    requesters,
)


def _defined(module: ModuleType) -> Iterator[type[Fact]]:
    for value in vars(module).values():
        if inspect.isclass(value) and issubclass(value, Fact) and value.__module__ == module.__name__ and value.kind:
            yield value


FACTS: Final[Mapping[str, type[Fact]]] = {UnreadableFact.kind: UnreadableFact} | {
    cls.kind: cls for module in _MODULES for cls in _defined(module)
}
"""Every fact class, by its kind. Base classes have none."""

MAX_UNREADABLE: Final = 1024


def fact_from(value: Any) -> Fact:
    """Convert ``Fact.to_dict``'s values."""
    if isinstance(value, Fact):
        return value
    if not isinstance(value, Mapping):
        return UnreadableFact(text=str(value)[:MAX_UNREADABLE])
    cls = FACTS.get(str(value.get("kind")))
    try:
        known = {f.name for f in fields(cls)} if cls is not None else set()
        fact = None if cls is None else cls(**{k: _read(cls, k, v) for k, v in value.items() if k in known})
    except (TypeError, ValueError):
        fact = None
    if fact is None or misfits(fact):
        text = ", ".join(f"{name} {item}" for name, item in value.items() if isinstance(item, str | int | float))
        return UnreadableFact(text=text[:MAX_UNREADABLE])
    return fact


def facts_from(values: Any) -> tuple[Fact, ...]:
    """Return the facts of a list's JSON form."""
    return tuple(fact_from(value) for value in values)


def _read(cls: type[Fact], name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(cls, name, item) for item in value)
    if isinstance(value, Mapping):
        return fact_from(value)
    kind = _enums(cls).get(name)
    return value if kind is None or value is None else kind(value)


def _enums(cls: type[Fact]) -> Mapping[str, type[Enum]]:
    """Return the fields that hold an enumeration."""
    if cls.kind in _ENUMS:
        return _ENUMS[cls.kind]
    classes = {name: _without_none(hint) for name, hint in get_type_hints(cls).items()}
    found = {name: hint for name, hint in classes.items() if inspect.isclass(hint) and issubclass(hint, Enum)}
    _ENUMS[cls.kind] = found
    return found


_ENUMS: dict[str, Mapping[str, type[Enum]]] = {}


def _without_none(hint: Any) -> Any:
    """Return the class of an annotation ``X | None``; any other annotation as it is."""
    parts = get_args(hint)
    inner = [part for part in parts if part is not NoneType]
    return inner[0] if len(inner) == 1 < len(parts) else hint


def _stored_fact(value: Any) -> Fact:
    """Convert a stored fact; a value that is no object stays, for ``conformance`` to replace."""
    kept: Fact = fact_from(value) if isinstance(value, Mapping) else value
    return kept


use_form(Fact, Fact.to_dict, _stored_fact)
