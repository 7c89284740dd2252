"""The seeded bugs can be inserted, and nearly all bugs that were tried were caught."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.__main__ import LEAST_CAUGHT, NOT_CAUGHT, ROOT, known, mutated
from tests.mutants.seeded import MUTANTS, TESTS, Mutant
from tests.support.trees import tree_of


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_bug_can_be_put_in(mutant: Mutant) -> None:
    text = (ROOT / "orchestrator" / mutant.path).read_text()
    assert ast.dump(tree_of(mutated(mutant, text))) != ast.dump(tree_of(text))
    assert [part for part in TESTS if mutant.path.startswith(part)]


def test_names_are_told_apart_and_tests_are_there() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert len(MUTANTS) >= 60
    assert [path for paths in TESTS.values() for path in paths if not (ROOT / path).exists()] == []


def test_nearly_all_that_were_tried_were_caught() -> None:
    caught = known()
    assert set(caught) <= {mutant.name for mutant in MUTANTS}
    assert sum(by != NOT_CAUGHT for by, _ in caught.values()) >= LEAST_CAUGHT * len(caught) > 0
