"""Facts survive conversion to JSON; values that this version cannot read become a fact that shows them unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from orchestrator.core.codec import misfits
from orchestrator.core.facts.codec import FACTS, fact_from
from orchestrator.core.facts.fact import FactRecord, UnreadableFact
from orchestrator.core.facts.faults import Xid
from tests.unit.core import strategies


@settings(max_examples=80, deadline=None)
@given(strategies.known_facts)
def test_every_fact_survives_its_json_form(fact: FactRecord) -> None:
    assert misfits(fact) == ()
    assert fact_from(json.loads(json.dumps(fact.to_dict()))) == fact


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
