"""The faults of one form are named rightly and in time, and docs/diagnosis.md shows the newest committed result."""

from __future__ import annotations

import json

import pytest

from benchmarks.insight import run
from benchmarks.insight.faults import FORMS, Case, cases
from benchmarks.insight.healthy import HEALTHY

FIRST = [case for case in cases() if case.form == FORMS[0][0]]


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.fault)
def test_a_fault_is_named_rightly_and_in_time(case: Case) -> None:
    result = run.judge(case)
    assert result["in_time"], result


def test_the_document_shows_the_newest_result() -> None:
    newest = max((run.ROOT / "benchmarks" / "results").glob("*-insight.json"))
    result = json.loads(newest.read_text(encoding="utf-8"))
    found = run.MARKS.search(run.DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2] == run.section(result), "run: python -m benchmarks.insight.run --write"
    assert result["in_time"] >= 0.95 * result["cases"]
    assert result["healthy"]["kinds"] == len(HEALTHY) >= 40
