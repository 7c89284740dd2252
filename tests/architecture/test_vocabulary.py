"""The words of docs/glossary.md: names of classes and modules, and the words of documents and docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from tests.support.trees import tree_of

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PACKAGE = ROOT / "orchestrator"


def listed(introduction: str) -> set[str]:
    """Return the words in backquotes of the paragraph with this beginning."""
    (paragraph,) = [part for part in GLOSSARY.read_text().split("\n\n") if part.startswith(introduction)]
    return set(re.findall(r"`([a-z]+)`", paragraph))


def words_of(name: str) -> set[str]:
    """Return the parts of a name, in CamelCase or with underscores."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def names() -> dict[str, set[str]]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        where = str(path.relative_to(ROOT))
        found[where] = words_of(path.stem)
        for node in ast.walk(tree_of(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[f"{where}:{node.name}"] = words_of(node.name)
    return found


def test_no_class_or_module_has_a_word_that_the_glossary_replaces() -> None:
    banned = listed("No class or module")
    assert len(banned) > 10
    assert {name: used & banned for name, used in names().items() if used & banned} == {}


def readable() -> list[Path]:
    """Return the files that people read: documents, the package, deployment files, boards."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = {".py", ".md", ".yml", ".yaml", ".sh", ".sql", ".service"}
    places = ("orchestrator", "docs", "deploy", "dashboards", "benchmarks", "examples")
    return [
        ROOT / name
        for name in listing.splitlines()
        if Path(name).suffix in kinds
        and (name.split("/")[0] in places or "/" not in name)
        and ROOT / name != GLOSSARY
        and (ROOT / name).exists()
    ]


def test_the_subject_is_a_program_a_file_or_a_person() -> None:
    banned = listed("No document, docstring, comment or message")
    assert banned
    pattern = re.compile(rf"\b({'|'.join(sorted(banned))})\b", re.IGNORECASE)
    files = readable()
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_a_docstring_says_what_the_thing_does() -> None:
    """Check that no first line of a docstring is a clause without a subject, such as "Who waits for whom"."""
    banned = listed("No docstring begins with")
    assert banned
    checked = 0
    found = []
    for folder in (PACKAGE, *(ROOT / name for name in ("benchmarks", "dashboards", "deploy", "examples", "tests"))):
        for path in folder.rglob("*.py"):
            for node in ast.walk(tree_of(path.read_text())):
                if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                text = ast.get_docstring(node)
                if text:
                    checked += 1
                    if re.split(r"\W", text, maxsplit=1)[0].lower() in banned:
                        found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert checked > 5000
    assert found == []
