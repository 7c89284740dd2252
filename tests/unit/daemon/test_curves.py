"""Charts of jobs' records: means with extremes, parts selected by time, long records sampled, foreign lines skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.api.curve_views import ChartView, CurveQuery, CurvesView
from orchestrator.core.diagnosis.observation import Pace
from orchestrator.core.ids import JobId
from orchestrator.daemon.curves import (
    MAX_BYTES,
    Grid,
    chart,
    gpu_history,
    job_curves,
    read_part,
    readings_of,
)
from orchestrator.daemon.jobs import metrics_file
from orchestrator.gpu.recording.job_record import COLUMNS, sampled_at
from orchestrator.train.script.progress_reading import ProgressSnapshot

JOB = JobId("digits-abc234")
BEGIN = 1_790_000_000.0
HEADER = ",".join(COLUMNS)


def line(at: float, step: int, **more: object) -> str:
    return json.dumps({"at": BEGIN + at, "attempt": 1, "step": step, "step_seconds": 0.5, "metrics": {}, **more})


def write_metrics(folder: Path, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{one}\n" for one in lines))


def write_telemetry(folder: Path, uuid: str, index: int, rows: int, *, begin: float = 0.0) -> Path:
    (folder / "telemetry").mkdir(parents=True, exist_ok=True)
    path = folder / "telemetry" / f"telemetry-{uuid}.csv"
    body = [f"{BEGIN + begin + n:.3f},{(n % 100) / 100},{2**30},{100 + index},,50,,,1" for n in range(rows)]
    path.write_text("\n".join([HEADER, *body]) + "\n")
    path.with_suffix(".json").write_text(json.dumps({"uuid": uuid, "index": index}))
    return path


def named(view: CurvesView, name: str) -> ChartView:
    return next(one for one in view.charts if one.name == name)


def test_a_line_is_drawn_through_means_and_keeps_the_extremes() -> None:
    parts = Grid(0.0, 10.0, 2).parts([(0.0, 1.0), (1.0, 3.0), (2.0, None), (6.0, None), (10.0, 5.0), (11.0, 99.0)])
    found = chart("loss", "", [("loss", parts)])
    assert found is not None
    (line_,) = found.curves
    assert (line_.x, line_.values, line_.lows, line_.highs) == ((0.0, 6.0), (2.0, 5.0), (1.0, 5.0), (3.0, 5.0))
    assert line_.not_finite == 2


def test_a_diverged_loss_is_a_gap_and_is_counted() -> None:
    found = chart("loss", "", [("loss", Grid(0.0, 10.0, 10).parts([(1.0, 0.5), (5.0, None)]))])
    assert found is not None
    assert (found.curves[0].values, found.curves[0].not_finite) == ((0.5, None), 1)


def test_many_gpus_are_one_line_with_the_band_that_they_lie_in() -> None:
    lines = [(f"GPU {n}", Grid(0.0, 1.0, 1).parts([(0.5, float(n))])) for n in range(32)]
    found = chart("GPU load", "%", lines)
    assert found is not None
    assert found.merged == 32
    assert [(one.label, one.values, one.lows, one.highs) for one in found.curves] == [
        ("mean of 32 GPUs", (15.5,), (0.0,), (31.0,))
    ]
    assert chart("GPU load", "%", [("GPU 0", {})]) is None


def test_a_job_without_records_has_no_charts(tmp_path: Path) -> None:
    assert job_curves(tmp_path, JOB, CurveQuery()).charts == ()
    write_metrics(tmp_path, "no JSON", '{"at": "x"}', '{"at": true, "step": 1}', "[1]", '{"at": 1e999, "step": 1}')
    assert job_curves(tmp_path, JOB, CurveQuery()).charts == ()


def test_charts_of_metrics_steps_ranks_and_gpus_share_one_time_axis(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        *(
            line(
                n,
                n,
                metrics={"loss": 1.0 / (n + 1), "accuracy": n / 10},
                rank_step_seconds=[n + 1, 1],
                rank_own_seconds=[0.1, 0.2 + n],
            )
            for n in range(10)
        ),
    )
    for index in range(2):
        write_telemetry(tmp_path, f"GPU-{index}", index, 10)
    view = job_curves(tmp_path, JOB, CurveQuery())
    assert [one.name for one in view.charts] == [
        "loss",
        "accuracy",
        "step time",
        "step time by rank",
        "step time by rank, waiting left out",
        "GPU load",
        "GPU memory",
        "GPU power",
        "GPU temperature",
    ]
    assert (view.begin, view.end, view.sampled) == (BEGIN, BEGIN + 9, False)
    assert [one.label for one in named(view, "GPU load").curves] == ["GPU 0", "GPU 1"]
    assert named(view, "GPU memory").curves[0].values == (1.0,) * 10
    assert named(view, "step time by rank, waiting left out").curves[1].values[3] == 3.2


def test_a_part_is_chosen_by_time_and_the_ends_are_still_those_of_everything(tmp_path: Path) -> None:
    write_metrics(tmp_path, *(line(n, n, metrics={"loss": float(n)}) for n in range(1000)))
    view = job_curves(tmp_path, JOB, CurveQuery(since=BEGIN + 500, until=BEGIN + 509, points=10))
    assert named(view, "loss").curves[0].values == tuple(float(n) for n in range(500, 510))
    assert (view.begin, view.end) == (BEGIN, BEGIN + 999)
    assert job_curves(tmp_path, JOB, CurveQuery(since=BEGIN + 5000)).charts == ()


def test_a_long_record_is_sampled_and_a_short_part_of_it_is_read_whole(tmp_path: Path) -> None:
    path = write_telemetry(tmp_path, "GPU-0", 0, 100_000)
    assert path.stat().st_size > MAX_BYTES
    whole = job_curves(tmp_path, JOB, CurveQuery())
    assert whole.sampled
    (curve,) = named(whole, "GPU power").curves
    assert len(curve.x) > 200
    assert (curve.x[0], curve.x[-1]) == pytest.approx((BEGIN, BEGIN + 99_999), abs=1000)
    part = job_curves(tmp_path, JOB, CurveQuery(since=BEGIN + 70_000, until=BEGIN + 70_099, points=100))
    assert not part.sampled
    assert named(part, "GPU load").curves[0].values == tuple(float(n) for n in range(100))


def test_what_is_read_at_once_is_bounded(tmp_path: Path) -> None:
    path = write_telemetry(tmp_path, "GPU-0", 0, 50_000)
    lines, sampled = read_part(path, sampled_at, None, None, 100_000)
    assert sampled
    assert 50_000 < sum(len(one) + 1 for one in lines) <= 100_000
    assert all(sampled_at(one) is not None for one in lines if one != HEADER.encode())


def test_by_step_the_steps_that_were_done_again_are_those_of_the_later_attempt(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        *(line(n, n, metrics={"loss": 1.0}) for n in range(6)),
        *(line(10 + n, n, attempt=2, metrics={"loss": 2.0}) for n in range(3, 9)),
    )
    view = job_curves(tmp_path, JOB, CurveQuery(by_step=True, points=9))
    assert named(view, "loss").curves[0].x == tuple(float(n) for n in range(9))
    assert named(view, "loss").curves[0].values == (1.0,) * 3 + (2.0,) * 6
    assert (view.begin, view.end) == (0.0, 8.0)


def test_a_record_that_is_a_link_or_a_pipe_is_left_out(tmp_path: Path) -> None:
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    write_telemetry(elsewhere, "GPU-0", 0, 5)
    (job / "telemetry").mkdir(parents=True)
    (job / "telemetry" / "telemetry-GPU-0.csv").symlink_to(elsewhere / "telemetry" / "telemetry-GPU-0.csv")
    os.mkfifo(job / "telemetry" / "telemetry-GPU-1.csv")
    os.mkfifo(job / "metrics.jsonl")
    assert job_curves(job, JOB, CurveQuery()).charts == ()


def test_a_gpu_has_a_history_over_the_jobs_that_it_was_recorded_for(tmp_path: Path) -> None:
    write_telemetry(tmp_path / "one-abc234", "GPU-0", 0, 10)
    write_telemetry(tmp_path / "two-abc234", "GPU-0", 0, 10, begin=100.0)
    write_telemetry(tmp_path / "two-abc234", "GPU-1", 1, 10, begin=100.0)
    view = gpu_history(tmp_path, ["GPU-0"], CurveQuery())
    assert [(use.job_id, use.begin - BEGIN, use.end - BEGIN) for use in view.uses] == [
        ("two-abc234", 100.0, 109.0),
        ("one-abc234", 0.0, 9.0),
    ]
    assert [one.label for one in view.charts[0].curves] == ["GPU 0"]
    assert gpu_history(tmp_path, ["GPU-9"], CurveQuery()).uses == ()
    assert gpu_history(tmp_path / "none", ["GPU-0"], CurveQuery()).charts == ()


def test_what_the_daemon_writes_is_what_is_read(tmp_path: Path) -> None:
    snapshot = ProgressSnapshot(step=7, step_seconds=0.25, metrics={"loss": 0.5, "nan": float("nan")})
    ranks = (Pace(rank=0, step_seconds=0.25, own_seconds=0.1), Pace(rank=2, step_seconds=0.25, own_seconds=0.2))
    path = tmp_path / "metrics.jsonl"
    metrics_file.append(path, 1, 7, snapshot, BEGIN, ranks=ranks)
    metrics_file.append(path, 1, 7, snapshot, BEGIN + 1)
    found = readings_of(path.read_bytes().splitlines(), by_step=False)
    assert found.rank_step_seconds == {0: [(BEGIN, 0.25)], 2: [(BEGIN, 0.25)]}
    assert found.rank_own_seconds == {0: [(BEGIN, 0.1)], 2: [(BEGIN, 0.2)]}
    assert found.metrics == {"loss": [(BEGIN, 0.5), (BEGIN + 1, 0.5)], "nan": [(BEGIN, None), (BEGIN + 1, None)]}
    assert metrics_file.newest(path) is not None
