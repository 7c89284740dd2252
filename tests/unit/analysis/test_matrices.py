"""Results of a matrix by configuration, the time that the rest of it takes, and the trials of a search as files and charts."""

from __future__ import annotations

import csv
import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.analysis.matrices import MatrixRun, Score, SearchResult, TrialResult, configurations, write_results
from orchestrator.analysis.runs import read_run
from orchestrator.analysis.trials import time_left
from tests.unit.analysis.runs import write_job

if TYPE_CHECKING:
    from pathlib import Path

LOSS = Score(name="loss", highest=False)


def made(directory: Path, name: str, state: str = "SUCCEEDED", *, offset: float = 0.0, **values: Any) -> MatrixRun:
    path = write_job(directory / name, metrics=lambda second: {"loss": offset + 1.0 / (second + 1)})
    return MatrixRun(job_id=name, state=state, values=values, run=read_run(path))


def test_a_configuration_is_the_mean_of_its_runs_not_the_luckiest(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "a", offset=0.0, lr=0.1, seed=1),
        made(tmp_path, "b", offset=2.0, lr=0.1, seed=2),
        made(tmp_path, "c", offset=0.5, lr=0.2, seed=1),
        made(tmp_path, "d", "FAILED", offset=-9.0, lr=0.2, seed=2),
    ]
    best, other = configurations(runs, LOSS)
    assert (best.values, best.runs, best.ended) == ({"lr": 0.2}, 2, 1)
    assert (other.values, other.runs, other.ended, other.job_ids) == ({"lr": 0.1}, 2, 2, ("a", "b"))
    loss = other.quantities["loss (best)"]
    assert (loss.mean, loss.std, loss.minimum, loss.maximum) == pytest.approx((1.025, math.sqrt(2), 0.025, 2.025))
    assert best.quantities["loss (best)"].std is None
    assert best.quantities["memory_mib"].mean == pytest.approx(2000.0)
    highest, _ = configurations(runs, Score(name="loss", highest=True))
    assert highest.values == {"lr": 0.1}


def test_everything_is_written(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "a", lr="=1+1", seed=1),
        MatrixRun(job_id="b", state="FAILED", values={"lr": 2, "seed": 1}, run=None),
    ]
    (tmp_path / "a" / "metrics.jsonl.1").symlink_to("/etc/passwd")
    results = write_results(runs, tmp_path / "out", LOSS)
    assert (tmp_path / "out/runs/a/telemetry/telemetry-GPU-0.csv").is_file()
    assert not (tmp_path / "out/runs/a/metrics.jsonl.1").exists()
    assert results.missing == ["b (FAILED) has recorded nothing"]
    assert "lr==1+1: 1 of 1 runs succeeded" in (tmp_path / "out/summary.txt").read_text()
    rows = list(csv.DictReader((tmp_path / "out/summary.csv").open()))
    assert rows[0]["lr"] == "'=1+1"
    assert json.loads((tmp_path / "out/summary.json").read_text())[0]["ended"] == 1
    for picture in (tmp_path / "out/graphs").iterdir():
        assert picture.read_bytes()[:4] == b"\x89PNG"
    assert len(list((tmp_path / "out/graphs").iterdir())) >= 4


def test_one_page_has_the_pareto_front_first_and_loads_nothing(tmp_path: Path) -> None:
    runs = [made(tmp_path, name, lr=f"<{name}>") for name in ("a", "b")]
    given = ({"loss": 1.0, "energy_joules": 2.0}, {"loss": 3.0, "energy_joules": 4.0})
    trials = [
        TrialResult(
            number=number, job_id=run.job_id, state=run.state, values=run.values, given=value, is_best=number == 0
        )
        for number, (run, value) in enumerate(zip(runs, given, strict=True))
    ]
    search = SearchResult(objectives={"loss": "min", "energy_joules": "min"}, trials=trials)
    results = write_results(runs, tmp_path / "out", LOSS, search=search, title="net-abc234")
    text = (tmp_path / "out/report.html").read_text()
    assert tmp_path / "out/report.html" in results.files
    order = [text.index(part) for part in ("Report of net-abc234", "Pareto front", "Other trials", "Configurations")]
    assert order == sorted(order)
    captions = re.findall(r"<figcaption>([^<]+)<", text)
    assert captions[0] == "pareto front (pareto_front.png)"
    assert len(captions) == len(list((tmp_path / "out/graphs").iterdir()))
    assert "&lt;a&gt;" in text
    assert not re.search(r"<a>|(?:src|href)=.(?!data:image/png;base64)", text)


def test_runs_are_drawn_side_by_side_and_their_reports_copied(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"job-{number}", lr=number) for number in range(14)]
    report = tmp_path / "job-0" / "report"
    report.mkdir()
    (report / "job-0_summary.txt").write_text("GPU 0")
    (report / "elsewhere.txt").symlink_to("/etc/passwd")
    results = write_results(runs, tmp_path / "out", LOSS)
    graphs = {path.name for path in (tmp_path / "out/graphs").iterdir()}
    assert {"gpu_memory_timeline.png", "gpu_memory_comparison.png", "training_memory_comparison.png"} <= graphs
    assert "memory_vs_accuracy_scatter.png" not in graphs, "no run has reported an accuracy"
    assert results.missing == ["pictures of runs side by side show the first 12 of 14"]
    assert (tmp_path / "out/runs/job-0/report/job-0_summary.txt").read_text() == "GPU 0"
    assert (tmp_path / "out/runs/job-0/report/elsewhere.txt").is_symlink(), "a link is not followed out of the job"


times = st.lists(st.floats(0, 1e4), max_size=12)


@given(times, times, st.integers(1, 5))
def test_time_left_is_between_the_bounds_of_any_order(running: list[float], waiting: list[float], at_once: int) -> None:
    left = time_left(running, waiting, at_once)
    everything = [*running, *waiting]
    assert left >= max(everything, default=0.0) - 1e-6
    assert left <= sum(everything) + 1e-6
    slots = max(at_once, len(running))
    assert left >= sum(everything) / slots - 1e-6


def trial(number: int, *given: float, pruned: bool = False, is_best: bool = False) -> TrialResult:
    names = ("loss", "energy_joules", "seconds")
    return TrialResult(
        number=number,
        job_id=f"net-{number}",
        state="CANCELLED" if pruned else "SUCCEEDED",
        values={"lr": 0.1 * number, "opt": "=adam"},
        given=dict(zip(names, given, strict=False)),
        pruned=pruned,
        is_best=is_best,
    )


def test_files_and_charts(tmp_path: Path) -> None:
    objectives = {"loss": "min", "energy_joules": "min", "seconds": "max"}
    trials = [trial(0, 1.0, 5.0, 2.0, is_best=True), trial(1, 2.0, 6.0, 1.0), trial(2, pruned=True)]
    found = SearchResult(objectives=objectives, trials=trials)
    for name, write in found.files().items():
        write(tmp_path / name)
    assert (tmp_path / "trials.csv").read_text().splitlines()[1:] == [
        "0,net-0,SUCCEEDED,0.0,'=adam,1.0,5.0,2.0,1",
        "1,net-1,SUCCEEDED,0.1,'=adam,2.0,6.0,1.0,0",
        "2,net-2,PRUNED,0.2,'=adam,,,,0",
    ]
    assert json.loads((tmp_path / "search.json").read_text())["objectives"] == objectives
    charts = found.charts()
    assert set(charts) == {"objective_loss", "objective_energy_joules", "objective_seconds", "pareto_front"}
    for name, draw in charts.items():
        assert draw(tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert found.text() == (
        "best trial 0 (net-0): loss=1, energy_joules=5, seconds=2 with lr=0.0, opt==adam\ntrials: 3, of which pruned: 1\n"
    )
