"""The suite's own rules: no durations judged, no changed constants, no sleeps instead of polling, no assertion on a page that does not wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.support.distribution import SECONDS
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


def trees(may_offend: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the tree of each file with text that matches; parsing all files takes seconds."""
    for path in FILES:
        if re.search(may_offend, text := path.read_text()):
            yield str(path.relative_to(TESTS)), tree_of(text)


def test_no_test_judges_how_long_something_took() -> None:
    of_clocks = rf"\b({'|'.join(CLOCKS)})\(|_seconds[\"']\]"
    found = [f"{name}:{line}" for name, tree in trees(of_clocks) for line in judged(tree)]
    assert found == [], "count work, or show an order: a busy machine is no defect of the code"


CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*[A-Z0-9]")
FOR_EVER_SECONDS = 60  # a longer sleep is meant to be interrupted, not waited for


def programs(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the file, and the Python programs that it contains as texts."""
    yield tree
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "\n" in node.value
            and "import" in node.value
        ):
            try:
                yield tree_of(node.value)
            except (SyntaxError, ValueError):
                continue


def is_constant(name: object) -> bool:
    return isinstance(name, str) and CONSTANT.fullmatch(name.rpartition(".")[2]) is not None


def changed_constants(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that change a constant of another object: by ``setattr``, by a patch, or by assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = node.args[:2] if called in ("setattr", "object", "patch", "delattr") else []
            if any(isinstance(one, ast.Constant) and is_constant(one.value) for one in named):
                yield node.lineno
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Attribute) and is_constant(one.attr) for one in targets):
                yield node.lineno


def is_short_sleep(node: ast.AST) -> bool:
    if (
        not isinstance(node, ast.Call)
        or (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) != "sleep"
    ):
        return False
    seconds = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    return not (isinstance(seconds, int | float) and (seconds == 0 or seconds >= FOR_EVER_SECONDS))


def hopeful_sleeps(tree: ast.AST, *, polls: bool = False) -> Iterator[int]:
    """Yield the lines of tests that sleep, except the pauses of a ``while`` that polls for its condition."""
    for node in ast.iter_child_nodes(tree):
        if is_short_sleep(node) and not polls:
            yield node.lineno  # type: ignore[attr-defined]  # a call has a line
        inside = (
            False if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else polls or isinstance(node, ast.While)
        )
        yield from hopeful_sleeps(node, polls=inside)


READS_OF_A_PAGE = {
    "all",
    "all_inner_texts",
    "all_text_contents",
    "content",
    "count",
    "get_attribute",
    "inner_html",
    "inner_text",
    "input_value",
    "is_checked",
    "is_disabled",
    "is_enabled",
    "is_hidden",
    "is_visible",
    "text_content",
    "title",
    "url",
}


def hasty_assertions(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that assert what a page shows at this moment, where ``expect`` waits for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and any(
            isinstance(part, ast.Attribute) and part.attr in READS_OF_A_PAGE for part in ast.walk(node.test)
        ):
            yield node.lineno


def functions_that_test(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def test_no_test_changes_a_constant() -> None:
    changes = r"setattr|delattr|patch|object\(|\.[A-Z][A-Z0-9_]+\b[^=\n]*="
    found = {
        f"{name}:{line}"
        for name, tree in trees(changes)
        for program in programs(tree)
        for line in changed_constants(program)
    }
    assert found == set(), "make it a parameter of what is tested, with the constant as its default"


def test_no_test_sleeps_for_luck() -> None:
    found = {
        f"{name}:{line}"
        for name, tree in trees(r"\bsleep\(")
        for test in functions_that_test(tree)
        for line in hopeful_sleeps(test)
    }
    assert found == set(), "wait for a condition; that nothing happens is shown by one that comes after it"


def test_an_assertion_on_a_page_waits() -> None:
    found = {
        f"{name}:{line}"
        for name, tree in trees(r"import .*\bplaywright\b|from playwright")
        for test in functions_that_test(tree)
        for line in hasty_assertions(test)
    }
    assert found == set(), "use expect(...) of playwright"


def test_every_file_that_is_called_long_is_there() -> None:
    assert SECONDS.keys() <= {path.name for path in TESTS.rglob("test_*.py")}
