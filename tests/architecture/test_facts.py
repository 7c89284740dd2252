"""Records of the core hold facts and no sentences of orch, and only sensors search texts by patterns."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import msgspec

from orchestrator.core import events
from orchestrator.core.diagnosis import health, quarantine
from orchestrator.core.facts.codec import FACTS
from orchestrator.core.facts.fact import UnreadableFact
from orchestrator.core.job import record
from orchestrator.core.job.record import Job
from tests.support.trees import tree_of

CORE = Path(__file__).parents[2] / "orchestrator" / "core"
SENTENCES = {"advice", "detail", "message", "reason", "sentence", "text", "why"}
SENSORS = {"diagnosis/signatures.py", "lifecycle/failure.py"}
"""These read the output of scripts and their libraries."""
TEXTS = {"str", "str | None", "Text", "Text | None"}


def _fields(cls: type) -> dict[str, str]:
    """Return the fields of a record or a dataclass with their declarations."""
    if issubclass(cls, msgspec.Struct):
        return {name: kind for base in cls.__mro__ for name, kind in vars(base).get("__annotations__", {}).items()}
    return {f.name: str(f.type) for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


RECORDS = {
    *FACTS.values(),
    Job,
    *(
        value
        for module in (events, record, health, quarantine)
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and _fields(value)
    ),
}


def test_no_record_holds_a_sentence() -> None:
    held = [
        f"{record.__qualname__}.{name}"
        for record in RECORDS - {UnreadableFact}
        for name, kind in _fields(record).items()
        if name in SENTENCES and kind in TEXTS
    ]
    assert held == [], "store a fact; its class puts it into words"


def test_only_sensors_search_in_texts() -> None:
    found = {
        str(path.relative_to(CORE))
        for path in CORE.rglob("*.py")
        for node in ast.walk(tree_of(path.read_text()))
        if isinstance(node, ast.Import) and any(name.name == "re" for name in node.names)
    }
    assert found <= SENSORS
