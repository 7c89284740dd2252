"""Every class of facts by its kind, and the conversion of JSON-ready values to facts.

A fact that cannot be read becomes an ``UnreadableFact``, so that its record opens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from orchestrator.core.codec import RecordError, from_plain, use_form
from orchestrator.core.facts import faults, findings, notes, reasons
from orchestrator.core.facts.fact import Fact, FactRecord, UnreadableFact

if TYPE_CHECKING:
    from types import ModuleType

_MODULES: Final[tuple[ModuleType, ...]] = (faults, findings, notes, reasons)


def _defined(module: ModuleType) -> Iterator[type[FactRecord]]:
    """Return the module's facts; a base class has no tag of its own, and so is called by its name."""
    for value in vars(module).values():
        own = inspect.isclass(value) and issubclass(value, FactRecord) and value.__module__ == module.__name__
        if own and value.kind != value.__name__:
            yield value


FACTS: Final[Mapping[str, type[FactRecord]]] = {UnreadableFact.kind: UnreadableFact} | {
    cls.kind: cls for module in _MODULES for cls in _defined(module)
}
"""Every fact class, by its kind."""

MAX_UNREADABLE: Final = 1024


def fact_from(value: Any) -> Fact:
    """Convert ``Fact.to_dict``'s values."""
    if isinstance(value, Fact):
        return value
    if not isinstance(value, Mapping):
        return UnreadableFact(text=str(value)[:MAX_UNREADABLE])
    cls = FACTS.get(str(value.get("kind")))
    try:
        if cls is not None:
            return from_plain(cls, value)
    except RecordError:
        pass
    text = ", ".join(f"{name} {item}" for name, item in value.items() if isinstance(item, str | int | float))
    return UnreadableFact(text=text[:MAX_UNREADABLE])


def _stored_fact(value: Any) -> Fact:
    if not isinstance(value, Mapping):
        raise msgspec.ValidationError("Expected a fact")
    return fact_from(value)


use_form(Fact, Fact.to_dict, _stored_fact)
