"""The files of flows, as docs/architecture.md lists them in tables between two comments."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SUBMIT, DEATH, SAMPLE = "flow-submit", "flow-death", "flow-sample"
BESIDE, FORMS = "flow-beside", "flow-forms"


def rows(name: str) -> list[str]:
    """Return the second to last cell of each row of a table."""
    (table,) = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", PAGE.read_text(), re.DOTALL)
    return [row.split("|")[-3].strip() for row in table.splitlines()[2:]]


def listed(name: str) -> set[str]:
    """Return the files of a table; a folder ends with a slash."""
    return {file for row in rows(name) for file in re.findall(r"`([^`]+)`", row)}
