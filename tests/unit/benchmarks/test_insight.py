"""Faults of one form are identified correctly and in time, and docs/diagnosis.md shows the newest committed result."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.insight import alerts, live_sound, run
from benchmarks.insight.faults import FORMS, Case, cases
from benchmarks.insight.healthy import HEALTHY

FIRST = [case for case in cases() if case.form == FORMS[0][0]]


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.fault)
def test_a_fault_is_named_rightly_and_in_time(case: Case) -> None:
    result = run.judge(case)
    assert result["in_time"], result


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: .ci/install-test-tools")
def test_the_alert_on_a_finding_fires_after_its_time_and_with_its_labels() -> None:
    labels = {"kind": "rank_slow", "job_id": "a", "rank": "3", "gpu_uuid": "GPU-3", "node": "n1"}
    whole = {**dict.fromkeys(labels, ""), "kind": "loss_flat", "job_id": "b"}
    opened = [{"labels": labels, "at": 121.0}, {"labels": whole, "at": 0.0}]
    assert alerts.check(opened) == 2


def test_the_document_shows_the_newest_result() -> None:
    newest = max((run.ROOT / "benchmarks" / "results").glob("*-insight.json"))
    result = json.loads(newest.read_text(encoding="utf-8"))
    found = run.MARKS.search(run.DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2] == run.section(result), "run: python -m benchmarks.insight.run --write"
    assert result["in_time"] >= 0.95 * result["cases"]
    assert result["healthy"]["kinds"] == len(HEALTHY) >= 40


def test_the_document_shows_the_job_hours_of_healthy_jobs_under_a_daemon() -> None:
    paths = sorted((run.ROOT / "benchmarks" / "results").glob("*-insight_live_sound.json"))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    result = results[-1]
    found = live_sound.MARKS.search(live_sound.DOCUMENT.read_text(encoding="utf-8"))
    assert found is not None
    assert found[2] == live_sound.section(result), "run: python -m benchmarks.insight.live_sound --write"
    assert sum(one["hours"] for each in results for one in each["runs"]) >= 30.0
