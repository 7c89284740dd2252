"""Rules for the tests themselves: no changed constants, no sleeps instead of polling, no assertion on a page that does not wait."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.trees import tree_of

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
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
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in FILES
        for program in programs(tree_of(path.read_text()))
        for line in changed_constants(program)
    }
    assert found == set(), "make it a parameter of what is tested, with the constant as its default"


def test_no_test_sleeps_for_luck() -> None:
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in FILES
        for test in functions_that_test(tree_of(path.read_text()))
        for line in hopeful_sleeps(test)
    }
    assert found == set(), "wait for a condition; that nothing happens is shown by one that comes after it"


def test_an_assertion_on_a_page_waits() -> None:
    files = [path for path in FILES if "playwright" in path.read_text() and path != Path(__file__)]
    assert files
    found = {
        f"{path.relative_to(TESTS)}:{line}"
        for path in files
        for test in functions_that_test(tree_of(path.read_text()))
        for line in hasty_assertions(test)
    }
    assert found == set(), "use expect(...) of playwright"
