"""docs/diagnosis.md: a section for each kind of finding, and the table of its thresholds as the code has them.

``python -m tests.unit.core.diagnosis.test_diagnosis_doc`` writes the table.
"""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.core.diagnosis.definitions import DEFINITIONS

DOCUMENT = Path(__file__).parents[4] / "docs" / "diagnosis.md"
MARKS = re.compile(r"(<!-- findings:begin -->\n)(.*?)(<!-- findings:end -->)", re.DOTALL)


def table() -> str:
    """Return the table of the definitions, one row each."""
    rows = ["| kind | severity | figure | opens | closes |", "|---|---|---|---|---|"]
    for cls, one in DEFINITIONS.items():
        opens = f"{one.opens_at:g} or more, {one.open_seconds:g} s"
        closes = f"below {one.closes_at:g}, {one.close_seconds:g} s"
        rows.append(f"| [{cls.kind}](#{cls.kind}) | {cls.severity} | {one.figure} | {opens} | {closes} |")
    return "\n".join(rows) + "\n"


def test_the_table_is_that_of_the_definitions() -> None:
    found = MARKS.search(DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2] == table(), f"run: python -m {__name__}"


def test_every_kind_has_a_section() -> None:
    sections = re.findall(r"^### (\w+)$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == [cls.kind for cls in DEFINITIONS]


if __name__ == "__main__":
    DOCUMENT.write_text(
        MARKS.sub(lambda m: m[1] + table() + m[3], DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8"
    )
