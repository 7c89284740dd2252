"""A value is computed once for each spec, and goes with it."""

from __future__ import annotations

import gc

from orchestrator.core.spec_memo import SpecMemo
from tests.unit.core.builders import make_spec


def test_a_value_is_made_once_for_each_object_and_goes_with_it() -> None:
    made: list[str] = []

    def make(given: str) -> str:
        made.append(given)
        return given.upper()

    memo, first, equal = SpecMemo[str](), make_spec(), make_spec()
    assert [memo.of(first, make, "a"), memo.of(first, make, "b"), memo.of(equal, make, "c")] == ["A", "A", "C"]
    assert made == ["a", "c"]
    for number in range(1000):
        assert memo.of(make_spec(workers=3), make, str(number)) == str(number), (
            "not that of a spec that had the same id"
        )
    gc.collect()
    assert len(memo._known) == 2
    assert memo.of(first, make, "d") == "A"
