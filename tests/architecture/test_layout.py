"""The shape of the repository: its folders, and the rules that every file keeps."""

from __future__ import annotations

import ast
import re
import subprocess
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


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def test_the_package_has_the_rooms_of_the_plan() -> None:
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"} == PACKAGES
    assert {p.name for p in PACKAGE.glob("*.py")} == {
        "__init__.py",
        "catalogue.py",
        "clock.py",
        "durable_files.py",
        "units.py",
        "parts.py",
        "private_files.py",
        "process_ends.py",
        "abandoned.py",
        "trees.py",
    }


def test_a_module_opens_with_what_it_owns() -> None:
    assert len(MODULES) > 100
    opening = re.compile(r'(#.*\n|\s)*r?"""')
    assert [name_of(path) for path in MODULES if not opening.match(path.read_text())] == []


def test_trees_are_walked_and_removed_by_one_module() -> None:
    """These functions call themselves for each level, and jobs choose how deep their trees are."""
    recursive = {"walk", "fwalk", "rmtree", "copytree", "rglob", "removedirs"}
    modules = {"os", "shutil", "Path", "glob"}
    found = []
    may_offend = re.compile("walk|rmtree|copytree|glob|removedirs")
    suspects = [path for path in MODULES if may_offend.search(path.read_text())]
    for path in suspects:
        for node in ast.walk(tree_of(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, ast.unparse(node.func.value)
            deep_glob = name in {"glob", "iglob"} and "**" in ast.unparse(node)
            recursive_glob = owner == "glob" and any(word.arg == "recursive" for word in node.keywords)
            if (name in recursive and owner not in {"trees", "ast"}) or deep_glob or recursive_glob:
                found.append(f"{name_of(path)}:{node.lineno} {owner}.{name}")
    assert found == [], "use orchestrator.trees"
    imported = [
        name_of(path)
        for path in suspects
        for node in ast.walk(tree_of(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module in modules
        and recursive & {each.name for each in node.names}
    ]
    assert imported == []


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
        if re.search(r"class \w*Error\b", path.read_text())
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


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md|sql))`", (ROOT / page).read_text()))
    assert named
    assert sorted(n for n in named if not (ROOT / n).exists() and not (PACKAGE / n).exists()) == []
