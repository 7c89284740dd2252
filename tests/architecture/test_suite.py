"""The suite itself: it asserts no durations, and detects what a session leaves behind."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from orchestrator.runtime.nodes.directories import namespace, page_directory
from tests.support import leftovers
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n began = time.monotonic()\n assert time.monotonic() - began < 5", [3]),
        ("def f():\n took = time.perf_counter() - began\n assert took < 1, 'slow'", [3]),
        ("def f():\n assert 0 < report['detection_seconds'] < report['recovery_seconds'] < 30", [2]),
        ("def f():\n assert 30 > report['recovery_seconds']", [2]),
        ("def f():\n assert 1 < report['detection_seconds'] < report['recovery_seconds']", []),
        ("def f():\n assert time.monotonic() < deadline", []),
        ("def f():\n assert seen(since=time.time() - 5) == []", []),
    ],
)
def test_the_rule_sees_a_judgement(text: str, found: list[int]) -> None:
    assert list(judged(tree_of(text))) == found


def test_what_a_session_leaves_behind_is_named_and_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers.tempfile, "tempdir", None)
    environ: dict[str, str] = {}
    directory = leftovers.begin(environ)
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(directory))
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "TMPDIR": str(directory)}
    )
    home = directory / "orch-t-home"
    home.mkdir()
    leftovers.note_home(home)
    pages = page_directory(namespace(home))
    pages.mkdir()
    left = leftovers.end(directory, seconds=0.0)
    assert sleeper.poll() is not None
    assert sorted(left) == sorted([str(home), str(pages), *[one for one in left if f"process {sleeper.pid}:" in one]])
    assert len(left) == 3
    assert not directory.exists()
    assert not pages.exists()


def test_what_another_session_has_is_left_alone() -> None:
    directory = leftovers.begin({})
    try:
        assert leftovers.processes(directory) == []
    finally:
        assert leftovers.end(directory, seconds=0.0) == []
