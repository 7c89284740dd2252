"""A job's records become points: each line once, despite rotation, restarts of the reader, and files of other kinds."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest

from orchestrator.analysis.trackers import journal as j
from orchestrator.analysis.trackers import records
from orchestrator.analysis.trackers.journal import Point
from orchestrator.analysis.trackers.records import GpuWindow, assign, gpu_values, read_on
from orchestrator.gpu.recording.job_record import COLUMNS

NOW = math.inf


def line(at: float, step: int | None, **metrics: float | None) -> str:
    body = {"at": at, "attempt": 1, "step": step, "max_step": step, "total_steps": None, "epoch": None}
    body |= {"phase": "", "samples": None, "tokens": None, "step_seconds": 0.5, "metrics": metrics}
    return json.dumps(body) + "\n"


def report(job: Path, *lines: str) -> None:
    with (job / "metrics.jsonl").open("a") as file:
        file.write("".join(lines))


def sample(job: Path, gpu: str, *rows: tuple[float, float, float, float]) -> None:
    (job / "telemetry").mkdir(exist_ok=True)
    path = job / "telemetry" / f"telemetry-{gpu}.csv"
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n")
    with path.open("a") as file:
        file.writelines(f"{at},{load},{memory},{power},,50,,,1\n" for at, load, memory, power in rows)


def test_each_line_becomes_one_point_with_its_step_and_time(tmp_path: Path) -> None:
    report(tmp_path, line(100.0, 1, loss=2.0), line(101.0, 2, loss=None))
    points, cursor = read_on(tmp_path, j.Cursor(), NOW)
    assert [(p.number, p.at, p.step) for p in points] == [(0, 100.0, 1), (1, 101.0, 2)]
    assert points[0].values == {"loss": 2.0, "step_seconds": 0.5, "attempt": 1.0, "elapsed_seconds": 0.0}
    assert math.isnan(points[1].values["loss"])
    assert points[1].values["elapsed_seconds"] == 1.0
    report(tmp_path, line(102.0, 3, loss=1.0))
    points, cursor = read_on(tmp_path, cursor, NOW)
    assert [p.number for p in points] == [2]
    assert read_on(tmp_path, cursor, NOW) == ([], cursor)


def test_a_line_that_is_not_whole_waits_and_what_is_no_line_of_orch_is_passed_over(tmp_path: Path) -> None:
    whole = line(100.0, 1, loss=2.0)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n[]\n" + '{"at": 1, "step": -1, "metrics": {}}\n' + whole[:20])
    points, cursor = read_on(tmp_path, j.Cursor(), NOW)
    assert points == []
    report(tmp_path, whole[20:])
    assert [p.at for p in read_on(tmp_path, cursor, NOW)[0]] == [100.0]


def test_a_file_that_was_replaced_is_read_to_its_end_before_the_new_one(tmp_path: Path) -> None:
    report(tmp_path, *(line(100.0 + i, i, loss=1.0) for i in range(3)))
    first, cursor = read_on(tmp_path, j.Cursor(), NOW)
    report(tmp_path, line(103.0, 3, loss=1.0))
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics.jsonl.1")
    report(tmp_path, line(104.0, 4, loss=1.0))
    second, cursor = read_on(tmp_path, cursor, NOW)
    assert [p.step for p in (*first, *second)] == [0, 1, 2, 3, 4]
    assert read_on(tmp_path, cursor, NOW)[0] == []


def test_records_that_were_copied_to_another_place_are_not_told_again(tmp_path: Path) -> None:
    report(tmp_path, *(line(100.0 + i, i, loss=1.0) for i in range(3)))
    _, cursor = read_on(tmp_path, j.Cursor(), NOW)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "copy").write_text(text + line(103.0, 3, loss=1.0))
    os.replace(tmp_path / "copy", tmp_path / "metrics.jsonl")
    assert [p.step for p in read_on(tmp_path, cursor, NOW)[0]] == [3]


def test_a_long_record_is_read_in_bounded_parts_and_each_line_once(tmp_path: Path) -> None:
    count = 2 * records.MAX_LINES + 7
    report(tmp_path, *(line(100.0 + i, i, loss=1.0) for i in range(count)))
    cursor, steps = j.Cursor(), []
    while True:
        points, after = read_on(tmp_path, cursor, NOW)
        if after == cursor:
            break
        assert len(points) <= records.MAX_LINES
        steps += [p.step for p in points]
        cursor = after
    assert steps == list(range(count))


def test_gpus_are_told_as_means_over_a_window_once_it_is_over(tmp_path: Path) -> None:
    report(tmp_path, line(1001.0, 7, loss=1.0))
    for gpu, load in (("a", 0.5), ("b", 1.0)):
        sample(tmp_path, gpu, *((1000.0 + i, load, 2**30, 100.0) for i in range(12)))
    points, cursor = read_on(tmp_path, j.Cursor(), 1010.0 + records.SETTLE_SECONDS - 1)
    assert [p.step for p in points] == [7]
    points, cursor = read_on(tmp_path, cursor, 1010.0 + records.SETTLE_SECONDS)
    (gpus,) = points
    assert (gpus.at, gpus.step) == (1010.0, 7)
    assert gpus.values["gpu_0_utilization"] == 50.0
    assert gpus.values["gpu_1_utilization"] == 100.0
    assert gpus.values["gpu_avg_utilization"] == 75.0
    assert gpus.values["gpu_total_memory"] == 2048.0
    assert gpus.values["gpu_0_memory"] == 1024.0
    assert gpus.values["gpu_load_balance_cv"] == pytest.approx(100 / 3)
    assert gpus.values["gpu_total_power"] == 200.0
    assert gpus.values["gpu_max_temperature"] == 50.0
    assert [p.at for p in read_on(tmp_path, cursor, NOW)[0]] == [1020.0]


def test_wherever_the_reader_stops_the_points_come_out_the_same(tmp_path: Path) -> None:
    rng = random.Random(5)
    for step in range(40):
        report(tmp_path, line(1000.0 + step, step, loss=rng.random()))
    for gpu in "ab":
        sample(tmp_path, gpu, *((1000.0 + i, rng.random(), 2**30, 100.0) for i in range(40)))
    whole, _ = read_on(tmp_path, j.Cursor(), NOW)
    cursor, parts = j.Cursor(), []
    for now in (1003.0, 1016.0, 1031.5, 1032.0, NOW):
        points, cursor = read_on(tmp_path, cursor, now)
        parts += points
    gpus = [(p.at, dict(p.values)) for p in whole if "gpu_count" in p.values]
    again = [(p.at, dict(p.values)) for p in parts if "gpu_count" in p.values]
    assert [at for at, _ in gpus] == [1010.0, 1020.0, 1030.0, 1040.0]
    assert [(at, v["gpu_0_utilization"]) for at, v in again] == [(at, v["gpu_0_utilization"]) for at, v in gpus]
    assert [p.number for p in parts] == list(range(len(whole)))


def test_the_gpus_of_the_next_attempt_go_on_with_the_numbers_of_the_first(tmp_path: Path) -> None:
    assert assign({}, {"b": 1, "a": 1}) == {"a": 0, "b": 1}
    assert assign({"a": 0, "b": 1}, {"b": 1, "c": 1}) == {"b": 1, "c": 0}
    assert assign({"a": 0, "b": 1}, {"b": 1}) == {"a": 0, "b": 1}
    assert assign({"a": 0, "b": 1}, {"c": 1, "d": 1, "e": 1}) == {"c": 0, "d": 1, "e": 2}
    sample(tmp_path, "a", (1000.0, 0.5, 1.0, 1.0))
    sample(tmp_path, "z", (1010.0, 0.25, 1.0, 1.0))
    points, _ = read_on(tmp_path, j.Cursor(), NOW)
    assert [p.values["gpu_0_utilization"] for p in points] == [50.0, 25.0]


def test_one_gpu_and_idle_gpus_have_no_balance() -> None:
    busy = GpuWindow(utilization=[0.9], memory_bytes=[2.0**30])
    idle = GpuWindow(utilization=[0.01])
    assert "gpu_load_balance_cv" not in gpu_values([(0, busy)])
    assert "gpu_load_balance_cv" not in gpu_values([(0, idle), (1, idle)])
    assert "gpu_0_power" not in gpu_values([(0, busy)])
    assert gpu_values([(0, busy), (1, busy)])["gpu_load_balance_cv"] == 0.0


@pytest.mark.parametrize("put", ["link", "fifo", "directory"])
def test_what_is_no_regular_file_is_no_record(tmp_path: Path, put: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if put == "link":
        (tmp_path / "other").write_text(line(1.0, 1))
        path.symlink_to(tmp_path / "other")
    elif put == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert read_on(tmp_path, j.Cursor(), NOW)[0] == []


def test_a_journal_comes_back_as_it_was_written_also_with_numbers_that_json_lacks(tmp_path: Path) -> None:
    points = (Point(number=3, at=1.5, step=2, values={"loss": math.inf, "x": -math.inf, "y": 1.0}),)
    cursor = j.Cursor(number=4, telemetry={"a": 3}, slots={"a": 0}, metrics=j.Place(inode=2**63 + 1, offset=3))
    path = j.path_of(tmp_path, "wandb")
    path.parent.mkdir()
    written = j.save(path, j.Journal(cursor=cursor, pending=points, points=4, where="there", facts={"run": "x"}))
    assert j.load(path) == written
    diverged = Point(number=0, at=0.0, step=0, values={"loss": math.nan})
    j.save(path, j.Journal(pending=(diverged,)))
    assert math.isnan(j.load(path).pending[0].values["loss"])


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '{"version": 2}', '{"version": 1, "cursor": {"number": -1}}', "[" * 100_000, "\xff"]
)
def test_a_journal_that_orch_has_not_written_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    assert j.load(tmp_path / "x.json") == j.Journal()
    assert j.load(tmp_path / "missing.json") == j.Journal()


@pytest.mark.parametrize("replaced", ["trackers", "."])
def test_no_journal_and_no_record_is_read_or_written_through_a_directory_that_the_job_replaced(
    tmp_path: Path, replaced: str
) -> None:
    """A job may put a link in place of its own directory, or of one in it."""
    job, other = tmp_path / "job", tmp_path / "other"
    (other / "trackers").mkdir(parents=True)
    report(other, line(1.0, 1))
    j.save(j.path_of(other, "wandb"), j.Journal(points=4))
    before = j.path_of(other, "wandb").read_bytes()
    if replaced == ".":
        job.symlink_to(other)
    else:
        job.mkdir()
        (job / "trackers").symlink_to(other / "trackers")
    assert j.load(j.path_of(job, "wandb")) == j.Journal()
    assert read_on(job, j.Cursor(), NOW)[0] == []
    with pytest.raises(ValueError, match="is not a directory but a link"):
        j.save(j.path_of(job, "wandb"), j.Journal())
    with pytest.raises(ValueError, match="is not a directory but a link"), j.own_folder(job, make=True):
        pass
    assert j.path_of(other, "wandb").read_bytes() == before
    assert os.listdir(other / "trackers") == ["wandb.json"]
