"""docs/security.md names a test for each attack: each named test exists, and each row has one."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.support.trees import tree_of

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
TEXT = (
    (ROOT / "docs" / "security.md").read_text().partition("## Attacks, and the test of each")[2].partition("\n## ")[0]
)
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| attack")]


@functools.cache
def names_in(path: str) -> set[str]:
    """Return the names of the test functions of a file."""
    tree = tree_of((ROOT / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_each_attack_has_tests_that_are_there() -> None:
    assert [row for row in ROWS if not NAMED.search(row)] == [], "name the test of this attack"
    named = [(path, name) for row in ROWS for path, name in NAMED.findall(row)]
    assert len(named) > 20
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
