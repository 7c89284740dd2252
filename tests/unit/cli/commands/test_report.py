"""`orch report`: files alone, jobs of a daemon, jobs of a home without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.analysis.runs import write_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def test_a_report_of_a_directory(orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    job = write_job(home / "a-run", gpus=1, seconds=20)
    done = orch("report", str(job))
    assert (done.code, done.err) == (0, "")
    assert "GPU 0: 1000.0 MB (±0.0)" in done.out
    assert "report-a-run/report.html" in done.out
    assert (home / "report-a-run" / "a-run_plot.png").is_file()


def test_a_report_as_json_where_it_was_asked_to_be(orch: Orch, home: Path) -> None:
    job = write_job(home / "jobs" / "digits-k3f9q2", gpus=0, seconds=20)
    done = orch("report", "digits", "--output-dir", str(home / "out"), "--json", "--price-per-kwh", "0.3")
    assert done.code == 0
    assert done.json["directory"] == str(home / "out")
    assert done.json["runs"][0]["name"] == job.name
    assert done.json["missing"]


@pytest.mark.parametrize(
    ("ref", "code", "said"),
    [
        ("gone.json", 3, "gone.json does not exist"),
        ("nojob", 3, "no running daemon has a job nojob"),
        ("same", 2, "same is the beginning of 2 jobs: same-aaaaaa, same-bbbbbb"),
        ("empty", 2, "neither telemetry nor metrics.jsonl"),
        ("x" * 5000, 3, "is neither a file nor a job"),
    ],
)
def test_what_is_no_run_is_said(orch: Orch, home: Path, ref: str, code: int, said: str) -> None:
    for name in ("same-aaaaaa", "same-bbbbbb", "empty-aaaaaa"):
        (home / "jobs" / name).mkdir(parents=True)
    done = orch("report", ref, "--output-dir", str(home / "out"))
    assert done.code == code
    assert said in done.err


def test_a_place_that_cannot_be_written_is_said(orch: Orch, home: Path) -> None:
    job = write_job(home / "job", gpus=0, seconds=5)
    (home / "file").write_text("")
    done = orch("report", str(job), "--output-dir", str(home / "file"))
    assert done.code == 2
    assert "cannot be written" in done.err
