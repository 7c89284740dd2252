"""A job's reports outlive the daemon that received them, and are used only as far as they are well formed."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.daemon.jobs import metrics_file
from orchestrator.daemon.jobs.progress import ProgressTable
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.unit.core.builders import T0, after, failed, gone, running, started

if TYPE_CHECKING:
    from pathlib import Path

FULL = ProgressSnapshot(
    step=40,
    max_step=40,
    total_steps=100,
    epoch=1.5,
    phase="train",
    samples=640,
    tokens=81_920,
    step_seconds=0.25,
    metrics={"loss": 0.5, "grad_norm": 1e308},
    last_report_at=T0 + 5,
)


def report(step: int, at: float, **fields: Any) -> ProgressSnapshot:
    """Return a rank's report."""
    return ProgressSnapshot(step=step, max_step=step, last_report_at=at, **fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a job's metrics file."""
    return tmp_path / "metrics.jsonl"


def test_nothing_is_written_or_read_through_a_link_in_place_of_the_job_s_directory(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "job").symlink_to(tmp_path / "mine")
    metrics_file.append(tmp_path / "mine" / "metrics.jsonl", 1, 10, report(10, T0), T0)
    before = (tmp_path / "mine" / "metrics.jsonl").read_bytes()
    with pytest.raises(OSError, match="symbolic link"):
        metrics_file.append(tmp_path / "job" / "metrics.jsonl", 2, 20, report(20, T0), T0)
    assert (tmp_path / "mine" / "metrics.jsonl").read_bytes() == before
    assert metrics_file.newest(tmp_path / "job" / "metrics.jsonl") is None


def test_the_newest_line_is_read_back(path: Path) -> None:
    metrics_file.append(path, 1, 10, report(10, T0), T0)
    metrics_file.append(path, 2, 55, FULL, T0 + 5)
    assert metrics_file.newest(path) == (2, 55, FULL)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_read_back_as_nan(path: Path, value: float) -> None:
    metrics_file.append(path, 1, 10, report(10, T0, metrics={"loss": value}), T0)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["metrics"] == {"loss": None}
    found = metrics_file.newest(path)
    assert found is not None
    assert math.isnan(found[2].metrics["loss"])


def test_a_line_without_optional_values_is_read_back(path: Path) -> None:
    metrics_file.append(path, 1, 3, report(3, T0), T0)
    assert metrics_file.newest(path) == (1, 3, report(3, T0))


def test_only_the_end_of_a_long_file_is_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    with path.open("ab") as file:
        file.write(b"\n")
    metrics_file.append(path, 1, 40, FULL, T0 + 5)
    assert metrics_file.newest(path) == (1, 40, FULL)


@pytest.mark.parametrize(
    "change",
    [
        {"at": "now"},
        {"at": math.nan},
        {"at": 1e300},
        {"at": True},
        {"attempt": None},
        {"attempt": -1},
        {"step": None},
        {"step": 1.5},
        {"step": 2**70},
        {"step": [1]},
        {"max_step": "all"},
        {"total_steps": math.inf},
        {"epoch": math.inf},
        {"epoch": -1.0},
        {"phase": 3},
        {"phase": "x" * 100},
        {"samples": {}},
        {"tokens": -5},
        {"step_seconds": "fast"},
        {"metrics": []},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": True}},
        {"metrics": {"loss": 10**400}},
        {"metrics": {"x" * 100: 1.0}},
        {"metrics": {f"m{n}": 1.0 for n in range(100)}},
    ],
)
def test_a_line_that_this_program_does_not_write_is_passed_over(path: Path, change: dict[str, Any]) -> None:
    metrics_file.append(path, 2, 55, FULL, T0 + 5)
    good = json.loads(path.read_text())
    with path.open("a") as file:
        file.write(json.dumps({**good, **change}) + "\n")
    assert metrics_file.newest(path) == (2, 55, FULL)


@pytest.mark.parametrize("rubbish", [b"", b"\0" * 5000, b"[1]\n", b"{}\n", b"[" * 60_000, b'{"at": 1', b"\xff\xfe\n"])
def test_rubbish_is_passed_over(path: Path, rubbish: bytes) -> None:
    path.write_bytes(rubbish)
    assert metrics_file.newest(path) is None
    path.write_bytes(rubbish + b"\n")
    metrics_file.append(path, 1, 40, FULL, T0 + 5)
    assert metrics_file.newest(path) == (1, 40, FULL)


def test_what_is_no_regular_file_is_neither_read_nor_written_and_nobody_waits_for_it(
    path: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    metrics_file.append(elsewhere, 1, 40, FULL, T0 + 5)
    before = elsewhere.read_bytes()
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to(elsewhere), path.mkdir):
        make()
        assert metrics_file.newest(path) is None
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            metrics_file.append(path, 1, 41, FULL, T0 + 6)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    assert elsewhere.read_bytes() == before


def test_the_last_report_of_a_job_is_there_for_the_next_daemon(path: Path) -> None:
    job, book = running(), ProgressTable()
    for step in range(1, 21):  # within one second: only the first of them is written as a line when it arrives
        book.take(job, 1, 0, report(step, T0 + step / 100, metrics={"loss": 1 / step}), path)
    book.settle(job.id, path)
    book.settle(job.id, path)
    assert len(path.read_text().splitlines()) == 2
    later = ProgressTable()
    assert later.of(job.id) is None
    later.recall({job.id: path})
    found = later.of(job.id)
    assert found is not None
    assert found.leader is not None
    assert (found.leader.step, found.leader.metrics) == (20, {"loss": 1 / 20})
    assert later.all() == {}, "the metrics show what live jobs do"


def test_values_that_came_after_the_last_step_are_kept(path: Path) -> None:
    job, book = running(), ProgressTable()
    book.take(job, 1, 0, report(5, T0), path)
    book.take(job, 1, 0, report(5, T0 + 1, metrics={"test_accuracy": 0.99}), path)
    book.settle(job.id, path)
    found = metrics_file.newest(path)
    assert found is not None
    assert found[2].metrics == {"test_accuracy": 0.99}


def test_steps_that_are_done_again_are_counted_across_daemons(path: Path) -> None:
    job, book = running(), ProgressTable()
    book.take(job, 1, 0, report(30, T0), path)
    book.settle(job.id, path)
    again = after(job, failed(job), gone(job))
    again = after(again, started(again, gang=again.gang))
    later = ProgressTable()
    later.resume([(again, path)])
    assert later.previous_step(job.id) == 30
    fresh = report(31, T0 + 9, new_step=31, new_step_at=T0 + 9)
    (first,) = later.take(again, 2, 0, fresh, path)
    assert (first.kind, getattr(first, "steps_lost", None)) == ("first_step", 30)


def test_a_file_that_tells_of_an_attempt_that_never_was_does_not_silence_the_job(path: Path) -> None:
    job, book = running(), ProgressTable()
    metrics_file.append(path, 99, 5, FULL, T0)
    book.resume([(job, path)])
    assert book.of(job.id) is None
    book.take(job, 1, 0, report(3, T0 + 1), path)
    found = book.of(job.id)
    assert found is not None
    assert found.attempt == 1


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics_file.append(path, 1, 40, FULL, T0)
    whole, write = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
    metrics_file.append(path, 1, 41, FULL, T0)
    assert path.read_bytes() == whole


def test_a_file_has_a_bound_and_its_newest_line_is_always_in_it(path: Path) -> None:
    for step in range(1, 101):
        metrics_file.append(path, 1, step, report(step, T0 + step), T0 + step, most_bytes=2000)
        found = metrics_file.newest(path)
        assert found is not None
        assert found[2].step == step
    assert path.stat().st_size <= 2000
    assert path.with_name("metrics.jsonl.1").stat().st_size < 3000
    assert len(list(path.parent.iterdir())) == 2
