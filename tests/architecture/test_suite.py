"""The suite itself: it asserts no durations, and detects what a session leaves behind."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.support.trees import tree_of

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
CLOCKS = {"monotonic", "perf_counter", "time", "process_time", "thread_time"}


def is_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def operands(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a compared value, except the arguments of calls."""
    yield node
    if not isinstance(node, ast.Call):
        for part in ast.iter_child_nodes(node):
            yield from operands(part)


def is_duration(node: ast.AST, names: Collection[str] = ()) -> bool:
    """Whether a value is computed by subtracting something from now, or is a variable in ``names``."""
    return any(
        (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and is_clock(part.left))
        or (isinstance(part, ast.Name) and part.id in names)
        for part in operands(node)
    )


def is_told_duration(node: ast.AST) -> bool:
    """Whether a value is one of a report's times: ``report["recovery_seconds"]``."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and node.slice.value.endswith("_seconds")
    )


def has_upper_bound(compare: ast.Compare) -> bool:
    """Whether the comparison requires that a report's duration is less than a number."""
    sides = [compare.left, *compare.comparators]
    for left, operator, right in zip(sides, compare.ops, sides[1:], strict=False):
        less, more = (right, left) if isinstance(operator, ast.Gt | ast.GtE) else (left, right)
        ordered = isinstance(operator, ast.Gt | ast.GtE | ast.Lt | ast.LtE)
        if ordered and is_told_duration(less) and isinstance(more, ast.Constant):
            return True
    return False


def judged(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that assert a duration, directly or through a variable."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        names = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and is_duration(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in (part for part in ast.walk(function) if isinstance(part, ast.Assert)):
            compared = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
            if any(map(has_upper_bound, compared)) or any(
                is_duration(side, names) for part in compared for side in (part.left, *part.comparators)
            ):
                yield node.lineno


def test_no_test_judges_how_long_something_took() -> None:
    found = [f"{path.relative_to(TESTS)}:{line}" for path in FILES for line in judged(tree_of(path.read_text()))]
    assert found == [], "count work, or show an order: a busy machine is no defect of the code"
