"""Contents of a report, and the process that writes it."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.analysis.report import relation_text, summary_text, write_report
from orchestrator.analysis.report_process import EXIT_FAILED, write_job_report
from orchestrator.analysis.run_summary import BalanceAndSpeed, summarize_run
from orchestrator.analysis.runs import Quantity, read_run
from orchestrator.analysis.statistics import Interval
from orchestrator.parts import install_line
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.analysis.runs import gpu, run, write_job

if TYPE_CHECKING:
    from pathlib import Path


def test_the_summary_has_the_sources_shape() -> None:
    gpus = [gpu(i, utilization=0.85, memory=[m - 40.0, m + 40.0]) for i, m in enumerate((12800, 12750, 12825, 12780))]
    text = summary_text(summarize_run(run(*gpus, name="ADAMWPRUNE Training")))
    assert text.startswith("GPU Performance Summary\n=======================\n")
    expected = """ADAMWPRUNE Training - Per-GPU Breakdown:
    GPU 0: 12800.0 MB (±40.0)
    GPU 1: 12750.0 MB (±40.0)
    GPU 2: 12825.0 MB (±40.0)
    GPU 3: 12780.0 MB (±40.0)
    Total:  51155.0 MB
    Balance: CV = 0.2% (Excellent)
"""
    assert expected in text
    assert "Duration: 59.0 s" in text
    assert "Utilization (%): average 85.0, max 85.0, min 85.0" in text


def test_a_report_of_one_run(tmp_path: Path) -> None:
    job = read_run(write_job(tmp_path / "digits-k3f9q2"))
    report = write_report([job], tmp_path / "out")
    assert {path.name for path in report.files} == {
        "digits-k3f9q2_summary.txt",
        "digits-k3f9q2_plot.png",
        "per_gpu_memory_breakdown.png",
        "gpu_load_balance_analysis.png",
        "gpu_memory_timeline.png",
        "report.html",
        "report.json",
    }
    assert all(path.stat().st_size > 0 for path in report.files)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("http-equiv", "")
    (figures,) = json.loads((tmp_path / "out" / "report.json").read_text())
    assert figures["energy_joules"] == pytest.approx(100 * 39 + 101 * 39)
    assert figures["gpus"][0]["quantities"]["memory"]["mean"] == 1000.0


def test_a_report_of_several_runs_has_pictures_of_all_together(tmp_path: Path) -> None:
    jobs = [
        read_run(write_job(tmp_path / name, gpus=1, memory=memory, metrics=lambda s: {"accuracy": s / 100}))
        for name, memory in (("a", 1494.0), ("b", 1381.5))
    ]
    report = write_report(jobs, tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in report.files}
    assert {"gpu_memory_comparison.png", "training_memory_comparison.png", "memory_vs_accuracy_scatter.png"} <= names
    assert {"1-a/a_summary.txt", "2-b/b_plot.png"} <= names
    assert report.missing == []


@pytest.mark.parametrize("count", [1, pytest.param(9, marks=pytest.mark.rare)])
def test_any_number_of_gpus_has_pictures(tmp_path: Path, count: int) -> None:
    gpus = [gpu(i, 20, utilization=0.9, power=200.0 + i, memory=1000.0 + i, temperature=60.0) for i in range(count)]
    report = write_report([run(*gpus)], tmp_path)
    assert report.missing == []
    assert len(report.pictures) == (3 if count == 1 else 4)


def test_a_run_without_gpus_has_a_page_and_says_why_there_are_no_pictures(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", gpus=0)
    report = write_report([read_run(job)], tmp_path / "out")
    assert report.missing == ["job: no GPU was sampled, so there are no pictures of GPUs"]
    assert "no GPU was sampled" in (tmp_path / "out" / "report.html").read_text()


def test_names_are_text_on_the_page_and_no_path_on_the_disk(tmp_path: Path) -> None:
    report = write_report([run(gpu(0, 20, memory=5.0), name="../<script>alert(1)</script>")], tmp_path / "out")
    assert all(path.parent == tmp_path / "out" for path in report.files)
    assert "<script>" not in (tmp_path / "out" / "report.html").read_text()


def test_without_matplotlib_there_are_text_and_page_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    report = write_report([run(gpu(0, 20, memory=5.0))], tmp_path)
    assert report.missing == [f"pictures need matplotlib: {install_line('plots')}"]
    assert {path.name for path in report.files} == {"run_summary.txt", "report.html", "report.json"}


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
    [
        (
            0.04,
            0.02,
            0.06,
            "an even load would have saved about 4.0 % of a step (2.0 to 6.0 %; 30 windows, CV of power)",
        ),
        (
            0.01,
            -0.02,
            0.04,
            "these data do not show that an uneven load cost speed (-2.0 to 4.0 % of a step; 30 windows",
        ),
        (-0.04, -0.06, -0.02, "steps were faster while the load was uneven"),
        (0.04, None, None, "these data are too short to say"),
    ],
)
def test_what_balance_has_to_do_with_speed_is_said_plainly(
    value: float, low: float | None, high: float | None, said: str
) -> None:
    gain = Interval(value=value, low=low, high=high)
    relation = BalanceAndSpeed(quantity=Quantity.POWER, windows=30, correlation=0.5, gain=gain)
    assert said in relation_text(relation)
    assert "not related" in relation_text(None)


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
