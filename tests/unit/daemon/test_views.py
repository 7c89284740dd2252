"""From a record and its progress to what the API answers: who is slow, and where ranks stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.api.views import JobView
from orchestrator.core.events import GangPlaced
from orchestrator.core.health import Frame, RankLook, Thread
from orchestrator.core.job import Job
from orchestrator.core.states import JobState
from orchestrator.daemon.progress import JobProgress
from orchestrator.daemon.views import job_view, rank_stacks
from orchestrator.train.progress import ProgressSnapshot
from tests.unit.core.builders import after, pending, seats, started


def running() -> Job:
    job = pending()
    job = after(job, started(job))
    placed = GangPlaced(job_id=job.id, at=2.0, gang=job.gang, seats=seats(job, ("a", "a")))
    return replace(after(job, placed), state=JobState.RUNNING)


def snapshot(busy: float, **parts: float) -> ProgressSnapshot:
    return ProgressSnapshot(step=9, recent_step_seconds=(1.0, 1.0, 5.0), busy_seconds=busy, metrics=parts)


def view(*ranks: ProgressSnapshot, job: Job | None = None) -> JobView:
    return job_view(job or running(), JobProgress(attempt=1, ranks=dict(enumerate(ranks))), None, "/logs")


def test_the_slow_rank_is_named_and_every_rank_shows_its_own_time() -> None:
    shown = view(snapshot(0.4), snapshot(0.8))
    assert shown.straggler is not None
    assert shown.straggler.rank == 1
    assert shown.straggler.factor == pytest.approx(2.0)
    assert [(rank.step_seconds, rank.own_seconds) for rank in shown.gpus] == [(1.0, 0.4), (1.0, 0.8)]
    assert JobView.from_json(shown.to_json()) == shown


def test_what_the_training_system_measures_comes_before_processor_time() -> None:
    shown = view(
        snapshot(0.9, data_seconds=0.1, forward_seconds=0.2), snapshot(0.1, data_seconds=0.5, forward_seconds=0.2)
    )
    assert shown.straggler is not None
    assert shown.straggler.rank == 1
    assert shown.straggler.factor == pytest.approx(0.7 / 0.3)


def test_nobody_is_named_before_all_have_reported_or_when_the_job_does_not_run() -> None:
    assert view(snapshot(0.4)).straggler is None
    ended = view(snapshot(0.4), snapshot(0.8), job=replace(running(), state=JobState.DRAINING))
    assert ended.straggler is None
    assert ended.gpus[0].step_seconds is None


def test_stacks_of_a_rank_that_was_reached_and_of_one_that_was_not() -> None:
    frames = (Frame("pull", "/work/data.py", 7),)
    look = RankLook(rank=1, at=0.0, pid=7, state="T", threads=(Thread(name="MainThread", frames=frames),))
    shown = rank_stacks(1, look)
    assert (shown.pid, shown.state, shown.threads[0].frames) == (7, "T", ("pull (/work/data.py:7)",))
    assert "not reached" in rank_stacks(1, None).problem
