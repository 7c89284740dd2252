"""The named statements of queries.sql. No other module of the program holds SQL."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMED = re.compile(r"^-- name: (?P<name>\w+)\n(?P<text>(?:(?!^-- name: ).*\n?)*)", re.MULTILINE)


def parse(text: str) -> dict[str, str]:
    """Return the statements of a file by name, without comments. Raises ValueError for a name without a comment, or used twice."""
    found: dict[str, str] = {}
    for match in _NAMED.finditer(text):
        name, lines = match["name"], match["text"].splitlines()
        if name in found or not lines or not lines[0].startswith("-- "):
            raise ValueError(f"statement {name!r}: give it a comment line of its own, and a name that is not taken")
        found[name] = "\n".join(line for line in lines if not line.startswith("--")).strip().rstrip(";")
    return found


STATEMENTS: Mapping[str, str] = parse(
    resources.files("orchestrator.store.sql").joinpath("queries.sql").read_text("utf-8")
)
