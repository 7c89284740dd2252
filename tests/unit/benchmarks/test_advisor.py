"""The evaluation of the advisor: errors, regrets, and raw data that a kill cuts short."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.advisor import evaluate, measure_group, read_groups
from orchestrator.bench.plan import BenchRequest
from orchestrator.bench.processes import RankProcesses, rank_environ

SETTINGS = {"runs": 2}


def prediction(ranks: int, rate: float) -> dict[str, Any]:
    return {"ranks": ranks, "samples_per_second": rate, "interval_95": [0.9 * rate, 1.1 * rate]}


def measured(batch: int, ranks: int, *rates: float) -> dict[str, Any]:
    return {"batch_size": batch, "ranks": ranks, "samples_per_second": list(rates)}


GROUP: dict[str, Any] = {
    "model": "large", "precision": "fp32", "settings": SETTINGS, "parameters": 2_021_379, "load": 0.1,
    "probe": {"steps": 20, "seconds": 0.5},
    "advice": [
        {"batch_size": 16, "ranks": 1, "certain": True, "predictions": [prediction(1, 104.0), prediction(2, 60.0)]},
        {"batch_size": 256, "ranks": 2, "certain": False, "predictions": [prediction(1, 100.0), prediction(2, 120.0)]},
    ],
    "measured": [
        measured(16, 1, 99.0, 101.0), measured(16, 2, 50.0, 50.0),
        measured(256, 1, 100.0, 100.0), measured(256, 2, 80.0, 80.0),
    ],
}  # fmt: skip


def test_predictions_and_choices_are_held_against_measurements() -> None:
    found = evaluate([GROUP])
    assert found["mean_error"] == pytest.approx((0.04 + 0.2 + 0.0 + 0.5) / 4)
    assert found["largest_error"] == pytest.approx(0.5)
    assert found["within_interval"] == 0.5
    assert [choice["best"] for choice in found["choices"]] == [1, 1]
    assert [choice["regret"] for choice in found["choices"]] == pytest.approx([0.0, 0.2])
    assert (found["good_choices"], found["good_choices_that_were_certain"]) == (0.5, 0.5)
    assert found["targets_met"] == {"mean_error": False, "good_choices": False}


def test_a_threshold_that_asks_for_a_measurement_gives_all_away() -> None:
    choices = evaluate([GROUP])["choices"]
    assert [(choice["thresholds"], choice["regret_of_thresholds"]) for choice in choices] == [(1, 0.0), (None, 1.0)]


def test_a_cell_that_failed_is_no_cell() -> None:
    found = evaluate([{**GROUP, "measured": GROUP["measured"][:2]}])
    assert (len(found["cells"]), len(found["choices"])) == (2, 1)


def test_a_line_that_a_kill_cut_short_is_measured_again(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    assert read_groups(raw, SETTINGS) == []
    raw.write_text(json.dumps(GROUP) + "\n" + json.dumps(GROUP)[:50])
    assert read_groups(raw, SETTINGS) == [GROUP]
    assert raw.read_text() == json.dumps(GROUP) + "\n"


def test_groups_of_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps(GROUP) + "\n")
    with pytest.raises(SystemExit, match="was measured with"):
        read_groups(raw, {"runs": 3})


def test_every_answer_counts_by_itself_against_the_median_of_all_rounds() -> None:
    later = {
        **GROUP,
        "advice": [{"batch_size": 16, "ranks": 2, "certain": True, "predictions": [prediction(1, 96.0)]}],
        "measured": [measured(16, 1, 100.0, 130.0), measured(16, 2, 50.0)],
    }
    found = evaluate([GROUP, later])
    of_cell = [cell["error"] for cell in found["cells"] if (cell["batch_size"], cell["ranks"]) == (16, 1)]
    assert of_cell == pytest.approx([104 / 100.5 - 1, 96 / 100.5 - 1])
    assert found["distinct_cells"] == 4
    of_median = abs((104 + 96) / 2 / 100.5 - 1)
    assert found["mean_error_of_median_answers"] == pytest.approx((of_median + 0.2 + 0.0 + 0.5) / 4)
    assert [choice["regret"] > 0 for choice in found["choices"]] == [False, True, True]
    assert found["mean_spread_of_measurements"] > 0


def test_a_group_is_asked_about_and_measured_on_the_same_ranks(tmp_path: Path) -> None:
    request = BenchRequest(batch_sizes=(4,), ranks=(1,), runs=1, steps=1)
    with RankProcesses(tmp_path, rank_environ(os.environ, 1)) as ranks:
        ranks.start(1)
        ranks.join([1], "cpu")
        group = measure_group(ranks, request)
    assert [one["ranks"] for one in group["measured"]] == [1]
    assert group["parameters"] == 54_403
    assert evaluate([group])["distinct_cells"] == 1


def test_the_floor_is_what_one_run_of_each_cell_would_have_said() -> None:
    other = {
        **GROUP,
        "round": 1,
        "measured": [
            measured(16, 1, 100.0), measured(16, 2, 50.0),
            measured(256, 1, 100.0), measured(256, 2, 125.0),
        ],
    }  # fmt: skip
    found = evaluate([GROUP, other])
    errors = [0.01, 0.0, 0.0, 1 - 80 / 125, 0.0, 0.0, 0.0, 125 / 80 - 1]
    assert found["mean_error_of_one_measurement"] == pytest.approx(sum(errors) / 8)
    assert found["good_choices_of_one_measurement"] == 0.5
    alone = evaluate([GROUP])
    assert (alone["mean_error_of_one_measurement"], alone["good_choices_of_one_measurement"]) == (None, None)
