"""The report of a job that has ended, written by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from orchestrator.analysis.report_process import EXIT_FAILED, write_job_report
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.analysis.runs import write_job

if TYPE_CHECKING:
    from pathlib import Path


def left(job: Path) -> list[str]:
    return sorted(path.name for path in job.iterdir() if path.name.startswith("report"))


def test_a_report_appears_whole(tmp_path: Path) -> None:
    job = write_job(tmp_path / "digits-k3f9q2", gpus=1, seconds=10)
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.analysis.report_process", str(job)],
        check=False,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert left(job) == ["report"]
    assert (job / "report" / "report.html").stat().st_size > 0
    assert (job / "report" / "digits-k3f9q2_plot.png").is_file()


def test_a_report_that_is_there_stays(tmp_path: Path) -> None:
    job = write_job(tmp_path / "a", gpus=0, seconds=5)
    (job / "report").mkdir()
    assert write_job_report(job) == 0
    assert list((job / "report").iterdir()) == []


def test_nothing_recorded_leaves_nothing(tmp_path: Path) -> None:
    assert write_job_report(tmp_path) == EXIT_FAILED
    assert left(tmp_path) == []


def test_a_job_that_is_removed_meanwhile_is_not_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_job_report(tmp_path / "gone") == EXIT_FAILED
    assert not (tmp_path / "gone").exists()
    assert capsys.readouterr().out == ""


def test_drafts_of_killed_writers_go_and_links_are_not_followed(tmp_path: Path) -> None:
    job = write_job(tmp_path / "a", gpus=0, seconds=5)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    (job / "report.draft-999999999").mkdir()
    (job / "report.draft-link").symlink_to(elsewhere)
    (job / f"report.draft-{os.getppid()}").mkdir()
    assert write_job_report(job) == 0
    assert left(job) == ["report", f"report.draft-{os.getppid()}"]
    assert (elsewhere / "kept").read_text() == "x"


def test_a_hostile_record_is_reported_or_refused_and_hurts_nothing(tmp_path: Path) -> None:
    job = write_job(tmp_path / "a", gpus=1, seconds=5)
    with (job / "metrics.jsonl").open("ab") as file:
        file.write(b'{"at": 1e999, "step": -1}\n[[[[' + b"[" * 100_000 + b"\n\xff\xfe\x00")
    os.mkfifo(job / "telemetry" / "telemetry-GPU-9.csv")
    assert write_job_report(job) == EXIT_FAILED
    assert left(job) == []
