"""The scheduler decides exactly as a naive one does; `make reference` holds ten thousand cases against it."""

from __future__ import annotations

from orchestrator.core.facts.reasons import NotEnoughFree
from tests.unit.core.scheduler.reference import answer, differences, random_case


def test_the_scheduler_decides_as_the_reference_does() -> None:
    assert differences(0, 200) == []


def test_the_cases_hold_what_there_is_to_decide() -> None:
    found = [answer(*random_case(seed)) for seed in range(250)]
    assert any(one.starts for one in found)
    assert any(one.stops for one in found)
    assert sum(one.backfilled for one in found) >= 3
    assert any(one.closing for one in found)
    assert any(one.reclaimed for one in found)
    assert any(one.shared for one in found)
    assert any(isinstance(fact, NotEnoughFree) and fact.reserved for one in found for fact in one.waiting.values())
    kinds = {type(reason).__name__ for one in found for reason in one.waiting.values()}
    limits = {"QueueAtMaximum", "UserAtLimit"}
    assert kinds == {
        "NotEnoughFree",
        "DoesNotFit",
        "NoNodeWithLabels",
        "AwaitsNodes",
        "BackingOff",
        "AwaitsRoom",
        *limits,
    }
