"""The shape of the repository: its folders, and the limits for the size and the unfinished parts of a file."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trees import tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "orchestrator"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)

PACKAGES = {
    "analysis",
    "api",
    "bench",
    "checkpoint",
    "cli",
    "core",
    "daemon",
    "data",
    "gpu",
    "runtime",
    "spec",
    "store",
    "telemetry",
    "train",
    "web",
}
MOST_LINES_IN_A_FILE = 540
MOST_LINES_IN_A_FUNCTION = 60
MOST_FILES_IN_A_FOLDER = 16


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def test_the_package_has_the_rooms_of_the_plan() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == PACKAGES
    assert {p.name for p in PACKAGE.glob("*.py")} == {
        "__init__.py",
        "catalogue.py",
        "figures.py",
        "parts.py",
        "private_files.py",
        "process_ends.py",
    }


def faults_of(path: Path) -> Iterator[str]:
    """Yield the faults of a module: a missing docstring, a file or a function that is too long."""
    text = path.read_text()
    tree = tree_of(text)
    if not ast.get_docstring(tree):
        yield f"{name_of(path)} does not open with what it owns"
    if len(text.splitlines()) > MOST_LINES_IN_A_FILE:
        yield f"split {name_of(path)}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.body[0].lineno + 1 > MOST_LINES_IN_A_FUNCTION:
                yield f"split {node.name} of {name_of(path)}"


def test_a_module_says_what_it_owns_and_stays_small() -> None:
    assert len(MODULES) > 100
    assert [fault for path in MODULES for fault in faults_of(path)] == []


def test_the_rule_sees_a_module_that_says_nothing_or_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    body = "    x = 1\n"
    path.write_text("def f():\n" + body * (MOST_LINES_IN_A_FUNCTION + 1) + "\n" * MOST_LINES_IN_A_FILE)
    name = str(path)
    assert list(faults_of(path)) == [f"{name} does not open with what it owns", f"split {name}", f"split f of {name}"]


def test_importing_a_package_does_next_to_nothing() -> None:
    allowed = ast.Expr | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.If | ast.FunctionDef
    packages = sorted(PACKAGE.glob("*/__init__.py"))
    assert packages
    busy = [
        name_of(path)
        for path in packages
        if not all(isinstance(node, allowed) for node in tree_of(path.read_text()).body)
    ]
    assert busy == []


def test_nothing_is_left_to_do_later() -> None:
    later = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")
    kinds = {".py", ".sql", ".yaml", ".yml", ".sh", ".toml", ".md"}
    found = [
        f"{name_of(path)}:{number}"
        for path in tracked()
        if path.suffix in kinds and "anchors" not in path.parts
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if later.search(line)
    ]
    assert found == []


def test_errors_say_what_happened_and_what_to_do() -> None:
    bare = [
        f"{name_of(path)}: {node.name}"
        for path in MODULES
        for node in ast.walk(tree_of(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not ast.get_docstring(node)
    ]
    assert bare == []


def test_sql_lives_in_sql_files() -> None:
    statement = re.compile(r"\b(?:SELECT\s+.+\s+FROM|INSERT INTO|UPDATE \w+ SET|DELETE FROM|CREATE (?:TABLE|INDEX))\b")
    found = [name_of(path) for path in MODULES if statement.search(path.read_text())]
    assert found == []


def tracked() -> list[Path]:
    """Return the files that git tracks; without git, as in an unpacked archive, every file."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return [p for folder in ("orchestrator", "tests", "docs") for p in (ROOT / folder).rglob("*") if p.is_file()]
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_nothing_waits_in_a_way_that_can_lose_a_cancellation() -> None:
    for path in MODULES:
        assert "asyncio.wait_for(" not in path.read_text(), f"{path}: see runtime/deadline.py"


def test_unit_tests_lie_where_the_package_does() -> None:
    """``tests/unit`` has the package's folders; tests of other trees (benchmarks, dashboards) have those."""
    unit = ROOT / "tests" / "unit"
    folders = {p.relative_to(unit) for p in unit.rglob("*") if p.is_dir() and p.name != "__pycache__"}
    roots = (PACKAGE, ROOT)
    assert sorted(f for f in folders if not any((root / f).is_dir() for root in roots)) == []


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|sql))`", (ROOT / page).read_text()))
    assert named
    assert sorted(n for n in named if not (ROOT / n).exists() and not (PACKAGE / n).exists()) == []


def test_a_folder_is_no_heap() -> None:
    folders = [path.parent for path in PACKAGE.rglob("__init__.py")]
    assert len(folders) > 30
    heaps = [
        name_of(folder)
        for folder in folders
        if len([p for p in folder.glob("*.py") if p.name != "__init__.py"]) > MOST_FILES_IN_A_FOLDER
    ]
    assert heaps == [], "make sub-packages"
