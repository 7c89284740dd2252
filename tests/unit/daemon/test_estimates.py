"""Estimates of jobs' time left as they report, and the record of their accuracy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.estimates import Ended, Estimated, EstimateRecord, Estimates, quality
from orchestrator.daemon.jobs import metrics_file
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.support.records import replace
from tests.unit.core.builders import T0, after, finished, gone, released, running, stop

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.job.record import Job


def report(step: int, at: float, total: int | None = 100, phase: str = "") -> ProgressSnapshot:
    return ProgressSnapshot(step=step, max_step=step, total_steps=total, last_report_at=at, phase=phase)


class World:
    """A desk with a clock that shows the time of the last report."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "estimates.jsonl"
        self.record = EstimateRecord(self.path)
        self.now = T0
        self.desk = self.new()
        self.job: Job = running()

    def new(self) -> Estimates:
        return Estimates(self.record, clock=lambda: self.now)

    def steps(self, first: int, last: int, *, seconds: float = 1.0, attempt: int = 1, rank: int = 0) -> None:
        for step in range(first, last + 1):
            self.now += seconds
            self.desk.follow(self.job, attempt, rank, report(step, self.now))

    def left(self) -> float | None:
        found = self.desk.left(self.job.id)
        return None if found is None else found.seconds

    def end(self, state: JobState = JobState.SUCCEEDED, seconds: float = 1.0) -> None:
        self.now += seconds
        going = after(self.job, stop(self.job, StopPurpose.CANCEL), gone(self.job), released(self.job))
        ended = after(going, finished(going, state, at=self.now))
        self.desk.observe(ended, finished(going, state, at=self.now))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_time_left_follows_the_reports_and_the_clock(world: World) -> None:
    assert world.left() is None
    world.steps(1, 40)
    assert world.left() == pytest.approx(60.0)
    world.now += 0.5
    assert world.left() == pytest.approx(59.5)
    world.now += 30.0
    assert world.left() == pytest.approx(59.0), "no more than a step passes without a report"


def test_the_lowest_rank_that_reports_leads(world: World) -> None:
    world.steps(1, 20, rank=1)
    world.steps(21, 40, rank=0)
    world.desk.follow(world.job, 1, 1, report(90, world.now + 1))
    assert world.left() == pytest.approx(60.0)


def test_estimates_are_recorded_at_shares_and_checked_at_the_end(world: World) -> None:
    world.steps(1, 100)
    world.end()
    found = quality(world.record.lines())
    assert [share.share for share in found.shares] == [0.1, 0.25, 0.5, 0.75, 0.9]
    assert (found.jobs, found.checked, found.within, found.interrupted) == (1, 5, 5, 0)
    assert found.median_error is not None
    assert found.median_error < 0.1


def test_what_a_script_does_after_its_last_step_is_no_error_of_the_estimate(world: World) -> None:
    world.steps(1, 100)
    world.end(seconds=60.0)
    found = quality(world.record.lines())
    assert (found.checked, found.within) == (5, 5)
    other = World(world.path.parent / "other")
    other.path.parent.mkdir()
    other.steps(1, 80)
    other.end(seconds=60.0)  # the last step was not reported: the end of the job counts
    assert quality(other.record.lines()).within == 0


def test_a_killed_daemon_loses_no_estimate_and_makes_none_twice(world: World, tmp_path: Path) -> None:
    world.steps(1, 30)
    metrics = tmp_path / "metrics.jsonl"
    for step in range(1, 31):
        metrics_file.append(metrics, 1, step, report(step, T0 + step), T0 + step)
    world.desk = world.new()
    world.desk.resume([(world.job.id, metrics), (replace(world.job).id, tmp_path / "none.jsonl")])
    assert world.left() == pytest.approx(70.0)
    world.steps(31, 100)
    world.end()
    found = quality(world.record.lines())
    assert [share.checked for share in found.shares] == [1, 1, 1, 1, 1]


def test_short_jobs_and_full_disks_leave_no_record(world: World, tmp_path: Path) -> None:
    world.steps(1, 100, seconds=0.01)
    world.end()
    assert not world.path.exists() or "share" not in world.path.read_text()
    other = World(tmp_path)
    other.record = EstimateRecord(tmp_path / "no-folder" / "estimates.jsonl")
    other.desk = other.new()
    other.steps(1, 60)
    assert other.left() == pytest.approx(40.0)


def test_lines_that_are_broken_are_passed_over_and_the_file_stays_small(tmp_path: Path) -> None:
    record = EstimateRecord(tmp_path / "e.jsonl", most_bytes=400)
    made = Estimated(job="a", attempt=1, at=5.0, share=0.5, seconds=10.0, low=9.0, high=11.0)
    record.add(made)
    with (tmp_path / "e.jsonl").open("a") as file:
        file.write('{"job": "a", "atte\n[]\nnull\n' + json.dumps({"job": "b", "attempt": 1, "share": 1e99}) + "\n")
    record.add(Ended(job="a", attempt=1, ended_at=15.0, succeeded=True))
    assert len(list(record.lines())) == 2
    for _ in range(20):
        record.add(made)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 600
