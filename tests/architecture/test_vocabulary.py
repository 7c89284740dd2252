"""The words of docs/glossary.md in the names of classes and modules."""

from __future__ import annotations

import re
from pathlib import Path

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
        for name in re.findall(r"^ *class (\w+)", path.read_text(), re.MULTILINE):
            found[f"{where}:{name}"] = words_of(name)
    return found


def test_no_class_or_module_has_a_word_that_the_glossary_replaces() -> None:
    banned = listed("No class or module")
    assert len(banned) > 10
    assert {name: used & banned for name, used in names().items() if used & banned} == {}
