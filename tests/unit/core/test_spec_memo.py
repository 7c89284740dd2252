"""A value is computed once for each spec, equal specs included, and only few values are kept."""

from __future__ import annotations

from orchestrator.core.spec_memo import SpecMemo
from tests.unit.core.builders import make_spec


def test_a_value_is_made_once_for_each_object_and_the_oldest_are_forgotten() -> None:
    made: list[str] = []

    def make(given: str) -> str:
        made.append(given)
        return given.upper()

    memo, first, equal, third = SpecMemo[str](2), make_spec(), make_spec(), make_spec(workers=3)
    assert [memo.of(first, make, "a"), memo.of(first, make, "b"), memo.of(equal, make, "c")] == ["A", "A", "C"]
    assert memo.of(third, make, "d") == "D"
    assert memo.of(first, make, "e") == "E"
    assert made == ["a", "c", "d", "e"]
