"""Trials of a search as files and charts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from orchestrator.analysis.matrices import SearchResult, TrialResult
from orchestrator.analysis.plots import PlotError

if TYPE_CHECKING:
    from pathlib import Path


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


def test_without_a_result_there_is_no_chart(tmp_path: Path) -> None:
    found = SearchResult(objectives={"loss": "min", "seconds": "min"}, trials=[trial(0, pruned=True)])
    assert found.text() == "trials: 1, of which pruned: 1\n"
    for draw in found.charts().values():
        with pytest.raises(PlotError):
            draw(tmp_path / "none.png")
