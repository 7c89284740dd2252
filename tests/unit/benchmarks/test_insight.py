"""Faults of one form are identified correctly and in time, and docs/diagnosis.md shows the newest committed result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.insight import alerts, live_sound, run
from benchmarks.insight.faults import FORMS, Case, cases
from benchmarks.insight.healthy import HEALTHY

FIRST = [case for case in cases() if case.form == FORMS[0][0]]


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.fault)
def test_a_fault_is_named_rightly_and_in_time(case: Case) -> None:
    result = run.judge(case)
    assert result["in_time"], result


def test_a_run_goes_on_where_it_was_cut_off_and_the_alert_is_checked(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    wanted = [unit for unit in run.units(1, 1) if unit.key in ("fault/8/0", "healthy/small job of 30 s/0")]
    assert run.work(wanted, keep, 0.0) == {}
    first = run.work(wanted, keep, 600.0)
    assert set(first) == {unit.key for unit in wanted}
    with keep.open("a") as file:
        file.write('{"key": "fault/9/0", "res')
    assert run.work(wanted, keep, 0.0) == first
    assert run.healthy("small job of 30 s", 3, 95.0) == []
    assert [alerts.fired_at(at) for at in (0.0, 120.0, 121.0)] == [30, 150, 165]


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


def test_findings_of_healthy_jobs_are_counted_by_their_kind() -> None:
    said = [{"job": "a", "kind": "rank_slow", "said": "first"}, {"job": "b", "kind": "rank_slow", "said": "second"}]
    one = {"jobs": 2, "hours": 1.0, "load": 3.0, "highest_load": 9.0, "processors": 2}
    text = live_sound.section({"runs": [{**one, "found": said}, {**one, "load": 4.0, "found": []}]})
    assert "4 healthy jobs, 2.0 job hours" in text
    assert "(median load 3 to 4, at most 9, on 2 processors): 2 findings." in text
    assert text.endswith("\n- 2 `rank_slow`, the first: first\n")


def test_of_24_healthy_jobs_there_is_one_of_each_manner_with_and_without_gpus_of_one_rank_and_of_two() -> None:
    resources = [(spec["name"], spec["resources"]) for spec in live_sound.specs(24, 60.0)]
    kinds = {(name, one["num_workers"], one["resources_per_worker"]["gpu"] > 0) for name, one in resources}
    assert len(kinds) == 24
