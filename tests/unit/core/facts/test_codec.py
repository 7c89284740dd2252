"""Facts survive conversion to JSON; values that this version cannot read become a fact that shows them unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from orchestrator.core.codec import misfits
from orchestrator.core.facts.codec import FACTS, fact_from
from orchestrator.core.facts.fact import Fact, FactRecord, UnreadableFact
from orchestrator.core.facts.faults import LeftEarly, ProcessSignal, Xid
from orchestrator.core.states import StopScope
from tests.unit.core import strategies


@settings(max_examples=300, deadline=None)
@given(strategies.known_facts)
def test_every_fact_survives_its_json_form(fact: FactRecord) -> None:
    assert misfits(fact) == ()
    assert fact_from(json.loads(json.dumps(fact.to_dict()))) == fact


class Probe(FactRecord, tag="probe"):
    """A fact with optional fields."""

    scope: StopScope | None = StopScope.RANK
    cause: Fact | None = None


@pytest.mark.parametrize(
    "fact", [Probe(), Probe(scope=None), Probe(scope=StopScope.MACHINE, cause=ProcessSignal(rank=1, signal=9))]
)
def test_an_optional_field_survives(fact: Fact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "probe", Probe)  # type: ignore[arg-type]
    found = fact_from(json.loads(json.dumps(fact.to_dict())))
    assert found == fact
    assert type(found.scope) is type(fact.scope)  # type: ignore[attr-defined]


def test_what_is_at_its_default_is_left_out() -> None:
    assert ProcessSignal(rank=1, signal=9).to_dict() == {"kind": "signal", "rank": 1, "signal": 9}
    assert LeftEarly(rank=0, scope=StopScope.MACHINE).to_dict() == {
        "kind": "left_early",
        "rank": 0,
        "scope": "machine",
    }


def test_every_class_has_a_kind_of_its_own() -> None:
    assert all(kind == cls.kind for kind, cls in FACTS.items())
    assert len({cls.kind for cls in FactRecord.__subclasses__() if cls.__subclasses__() == []}) > 40


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"kind": "of_a_later_version", "rank": 3, "said": "boom"}, "kind of_a_later_version, rank 3, said boom"),
        ({"kind": "xid"}, "kind xid"),
        ({"kind": "xid", "number": "many"}, "kind xid, number many"),
        ({"kind": "left_early", "scope": "planet"}, "kind left_early, scope planet"),
        ("no object", "no object"),
        (None, "None"),
    ],
)
def test_what_cannot_be_read_is_shown_as_it_is(value: Any, shown: str) -> None:
    found = fact_from(value)
    assert isinstance(found, UnreadableFact)
    assert (found.sentence(), found.code) == (shown, "unreadable")


def test_a_field_that_a_later_version_added_is_no_reason_to_refuse() -> None:
    assert fact_from({"kind": "xid", "number": 79, "colour": "red"}) == Xid(number=79)
