"""Reports of ranks reach those that follow them, and those of ended jobs are kept for a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from orchestrator.daemon.changes import Changes
from orchestrator.daemon.estimates import EstimateRecord, Estimates
from orchestrator.daemon.jobs import metrics_file
from orchestrator.daemon.jobs.progress import ProgressIntake, ProgressTable
from orchestrator.runtime.pools import Pool
from orchestrator.spec.settings import Settings
from orchestrator.train.script.progress_reading import ProgressSnapshot
from tests.unit.core.builders import running
from tests.unit.daemon.parts import LOG

if TYPE_CHECKING:
    from pathlib import Path


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.job = running()
        self.paths = Settings.from_environ({"ORCH_HOME": str(tmp_path)}).paths
        self.paths.job(self.job.id).mkdir(parents=True)
        self.followed: list[Any] = []
        self.posted: list[Any] = []
        self.changes = Changes(0)
        self.intake = self.new()

    def new(self) -> ProgressIntake:
        return ProgressIntake(
            ProgressTable(),
            self.paths,
            jobs=lambda: {self.job.id: self.job},
            followers=(lambda job, attempt, rank, _: self.followed.append((job.id, attempt, rank)),),
            post=self.posted.extend,
            estimates=Estimates(EstimateRecord.of(self.paths.home)),
            changes=self.changes,
            pool=Pool("records", 1),
            log=LOG,
            remember=1,
        )


REPORT = ProgressSnapshot(step=7, max_step=7, new_step=7, new_step_at=5.0, last_report_at=5.0)


def test_a_report_is_followed_counted_and_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.intake.take(world.job.id, 1, 0, REPORT)
    assert world.followed == [(world.job.id, 1, 0)]
    assert [event.kind for event in world.posted] == ["first_step"]
    assert world.changes.version == 1
    book = world.intake.of(world.job.id)
    assert book is not None
    assert book.highest_step == 7


def test_a_report_of_a_job_that_is_not_live_is_dropped(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.intake.take("other-aaaaaa", 1, 0, REPORT)  # type: ignore[arg-type]
    assert (world.followed, world.posted, world.changes.version) == ([], [], 0)


def test_the_next_daemon_knows_the_newest_report(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.intake.take(world.job.id, 1, 0, REPORT)
    world.intake.settle()
    for recall in (ProgressIntake.resume, lambda intake: intake.recall([world.job])):
        later = world.new()
        asyncio.run(recall(later))
        book = later.of(world.job.id)
        assert book is not None
        assert book.highest_step == 7


def test_a_new_daemon_reads_what_live_jobs_reported_and_estimates_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.intake.left(world.job.id) is None
    for step in range(1, 31):
        report = ProgressSnapshot(step=step, max_step=step, total_steps=100, last_report_at=1e9 + step)
        metrics_file.append(world.paths.metrics(world.job.id), 1, step, report, 1e9 + step)
    intake = world.new()
    asyncio.run(intake.resume())
    left = intake.left(world.job.id)
    assert left is not None
    assert 69.0 <= left.seconds <= 70.0
