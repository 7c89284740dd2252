"""The seeded bugs can be inserted, and nearly all bugs that were tried were caught."""

from __future__ import annotations

import ast
from collections import Counter

from tests.mutants.__main__ import LEAST_CAUGHT, NOT_CAUGHT, ROOT, known, mutated
from tests.mutants.seeded import MUTANTS, TESTS


def test_each_bug_can_be_put_in() -> None:
    for mutant in MUTANTS:
        text = (ROOT / "orchestrator" / mutant.path).read_text()
        ast.parse(mutated(mutant, text))  # raises where the text to change is not there exactly once
        assert mutated(mutant, text) != text, mutant.name
        assert [part for part in TESTS if mutant.path.startswith(part)], mutant.name


def test_names_are_told_apart_and_tests_are_there() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert len(MUTANTS) >= 60
    assert [path for paths in TESTS.values() for path in paths if not (ROOT / path).exists()] == []


def test_nearly_all_that_were_tried_were_caught() -> None:
    caught = known()
    assert set(caught) <= {mutant.name for mutant in MUTANTS}
    assert sum(by != NOT_CAUGHT for by, _ in caught.values()) >= LEAST_CAUGHT * len(caught) > 0
