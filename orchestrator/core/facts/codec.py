"""Converts facts to JSON-ready values and back: an object with the fact's ``kind`` and the fields without default values.

An unreadable fact (a sentence of an earlier version, a kind of a later one) becomes a ``Legacy``, so that a record of any
version opens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
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
    moves,
    nodes,
    notes,
    rank_ends,
    reasons,
    requesters,
)
from orchestrator.core.facts.fact import Fact, Legacy

if TYPE_CHECKING:
    from types import ModuleType

_MODULES: Final[tuple[ModuleType, ...]] = (
    findings,
    gangs,
    gpus,
    hangs,
    memory,
    moves,
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


FACTS: Final[Mapping[str, type[Fact]]] = {Legacy.kind: Legacy} | {
    cls.kind: cls for module in _MODULES for cls in _defined(module)
}
"""Every fact class, by its kind. Base classes have none."""


def fact_to_dict(fact: Fact) -> dict[str, Any]:
    """Return the fact as JSON-ready values."""
    plain: dict[str, Any] = {"kind": fact.kind}
    for f in fields(fact):
        value = getattr(fact, f.name)
        if f.default is MISSING or value != f.default:
            plain[f.name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Fact):
        return fact_to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def fact_from(value: Any, *, code: str = "", advice: str = "") -> Fact:
    """Convert ``fact_to_dict``'s values; ``code`` and ``advice`` are what an earlier version stored beside a sentence."""
    if isinstance(value, Fact):
        return value
    if isinstance(value, str):
        return Legacy(sentence=value, legacy_code=code, advice=advice)
    if not isinstance(value, Mapping):
        return Legacy(sentence="", legacy_code=code)
    cls = FACTS.get(str(value.get("kind")))
    try:
        known = {f.name for f in fields(cls)} if cls is not None else set()
        fact = None if cls is None else cls(**{k: _read(cls, k, v) for k, v in value.items() if k in known})
    except (TypeError, ValueError):
        fact = None
    if fact is None or misfits(fact):
        text = ", ".join(f"{name} {item}" for name, item in value.items() if isinstance(item, str | int | float))
        return Legacy(sentence=text, legacy_code=code or str(value.get("kind", "")))
    return fact


def facts_from(values: Any) -> tuple[Fact, ...]:
    """Return the facts of a list's JSON form."""
    return tuple(fact_from(value) for value in values)


def _read(cls: type[Fact], name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(cls, name, item) for item in value)
    if isinstance(value, Mapping):
        return fact_from(value)
    kind = _kinds(cls).get(name)
    if kind is None or value is None:
        return value
    return fact_from(value) if kind is Fact and isinstance(value, str) else kind(value)


def _kinds(cls: type[Fact]) -> Mapping[str, type[Any]]:
    """Return the fields that hold an enumeration, or a fact that earlier versions stored as a sentence."""
    found = _KINDS.get(cls.kind)
    if found is None:
        hints = get_type_hints(cls)
        classes = {name: _without_none(hint) for name, hint in hints.items()}
        found = {
            name: hint
            for name, hint in classes.items()
            if inspect.isclass(hint) and (hint is Fact or issubclass(hint, Enum))
        }
        _KINDS[cls.kind] = found
    return found


def _without_none(hint: Any) -> Any:
    """Return the class of an annotation ``X | None``; any other annotation as it is."""
    parts = get_args(hint)
    inner = [part for part in parts if part is not NoneType]
    return inner[0] if len(inner) == 1 < len(parts) else hint


_KINDS: dict[str, Mapping[str, type[Any]]] = {}


def _stored_fact(value: Any) -> Fact:
    """Convert a stored fact; a value that is neither a sentence nor an object stays, for ``conformance`` to replace."""
    kept: Fact = fact_from(value) if isinstance(value, str | Mapping) else value
    return kept


use_form(Fact, fact_to_dict, _stored_fact)
