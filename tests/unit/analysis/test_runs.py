"""Readers convert every kind of file to the same form."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from orchestrator.analysis.runs import Quantity, SourceError, read_run
from tests.unit.analysis.runs import MIB, START, gputop_entry, progress_row, write_job, write_json

if TYPE_CHECKING:
    from pathlib import Path


def test_a_job_has_its_gpus_and_its_progress(tmp_path: Path) -> None:
    run = read_run(write_job(tmp_path / "digits-k3f9q2", gpus=3, seconds=20))
    assert (run.name, len(run.gpus), run.seconds, run.samples) == ("digits-k3f9q2", 3, 19.0, 60)
    assert [one.label for one in run.gpus] == ["GPU 0", "GPU 1", "GPU 2"]
    assert run.gpus[1].shown(Quantity.MEMORY).tolist() == [1000.0] * 20
    assert run.progress is not None
    assert run.progress.steps[-1] == 190
    assert run.progress.metrics["loss"][1] == 0.5


def test_rows_that_a_crash_cut_off_and_headers_between_rows_are_left_out(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", gpus=1, seconds=5)
    path = job / "telemetry" / "telemetry-GPU-0.csv"
    whole = path.read_text()
    path.write_text(whole + f"{START + 5},0.9,12\n" + whole.replace(f"{START:.1f}"[:4], f"{START:.1f}"[:4]))
    run = read_run(job)
    assert (run.samples, run.dropped) == (10, 1)
    assert (np.diff(run.gpus[0].times) >= 0).all()


def test_missing_values_are_not_zero(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", gpus=1, seconds=3)
    path = job / "telemetry" / "telemetry-GPU-0.csv"
    path.write_text(
        path.read_text().replace(",0.9,", ",,", 1).replace(",0.9,", ",word,", 1).replace(",0.9,", ",inf,", 1)
    )
    assert np.isnan(read_run(job).gpus[0].values[Quantity.UTILIZATION]).all()


def test_two_nodes_may_have_a_gpu_of_the_same_number(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", gpus=2, seconds=3)
    identity = job / "telemetry" / "telemetry-GPU-1.json"
    identity.write_text(identity.read_text().replace('"index": 1', '"index": 0'))
    assert [one.label for one in read_run(job).gpus] == ["GPU 0 (0)", "GPU 0 (1)"]


def test_what_a_job_puts_in_place_of_its_files_is_not_followed(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", gpus=1, seconds=3)
    (job / "metrics.jsonl").unlink()
    os.mkfifo(job / "metrics.jsonl")
    assert read_run(job).progress is None
    (job / "telemetry" / "telemetry-GPU-0.csv").unlink()
    (job / "telemetry" / "telemetry-GPU-0.csv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match="cannot be read"):
        read_run(job)


def test_lines_that_are_no_progress_are_passed_over(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", gpus=1, seconds=3)
    bad = [{}, {"at": "now", "step": 1}, {"at": START, "step": -1}, [], progress_row(9, 90, {"loss": float("nan")})]
    (job / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in bad) + "no json\n[[[[")
    progress = read_run(job).progress
    assert progress is not None
    assert progress.steps.tolist() == [90]
    assert np.isnan(progress.metrics["loss"]).all()


def test_a_single_gpu_recording(tmp_path: Path) -> None:
    path = write_json(tmp_path / "gpu_stats_adamw_20250115_103000.json", [gputop_entry(n) for n in range(4)])
    run = read_run(path)
    assert (run.name, run.seconds) == ("gpu_stats_adamw_20250115_103000", 3.0)
    assert run.gpus[0].shown(Quantity.UTILIZATION).tolist() == [85.0] * 4
    assert run.gpus[0].memory_total_bytes == 24576 * MIB


@pytest.mark.parametrize("asked", ["gpu_stats_a.json", "gpu_stats_a_multi_gpu.json"])
def test_of_two_files_the_one_with_all_gpus_is_read(tmp_path: Path, asked: str) -> None:
    write_json(tmp_path / "gpu_stats_a.json", [gputop_entry(0)])
    many = [
        {"timestamp": gputop_entry(n)["timestamp"], "multi_gpu_data": [gputop_entry(n, gpu_index=i) for i in range(4)]}
        for n in range(3)
    ]
    write_json(tmp_path / "gpu_stats_a_multi_gpu.json", many)
    run = read_run(tmp_path / asked)
    assert (run.name, len(run.gpus), run.samples) == ("gpu_stats_a", 4, 12)


def test_a_recording_whose_end_is_cut_off(tmp_path: Path) -> None:
    path = write_json(tmp_path / "gpu_stats_a.json", [gputop_entry(n) for n in range(4)])
    path.write_text(path.read_text()[:-40])
    run = read_run(path)
    assert (run.samples, run.repaired) == (3, True)


def test_what_a_recorded_run_said_of_itself_is_its_progress(tmp_path: Path) -> None:
    said = {"epoch": 1, "batch": 100, "phase": "training"}
    entries = [
        gputop_entry(0),
        gputop_entry(1, training_metadata=said),
        gputop_entry(2, training_metadata={**said, "batch": 120}),
    ]
    progress = read_run(write_json(tmp_path / "a.json", entries)).progress
    assert progress is not None
    assert (progress.steps.tolist(), progress.phases) == ([100, 120], ("training", "training"))


@pytest.mark.parametrize(
    ("content", "said"),
    [("hello", "is no GPU recording"), ("[]", "holds no readings"), (None, "neither telemetry nor metrics")],
)
def test_what_cannot_be_analysed_is_said_with_what_was_expected(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "a.json"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    with pytest.raises(SourceError, match=said):
        read_run(path)
