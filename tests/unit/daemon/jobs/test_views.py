"""From a record and its progress to what the API answers: who is slow, and where ranks stand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.api.views import JobView
from orchestrator.core import events as ev
from orchestrator.core.diagnosis.health import Frame, RankLook, Thread
from orchestrator.core.events import Exit, FirstStep, GangPlaced, RankExited
from orchestrator.core.job.record import Job
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.jobs.event_views import event_view
from orchestrator.daemon.jobs.progress import JobProgress
from orchestrator.daemon.jobs.views import job_view, rank_stacks
from orchestrator.store.port import StoredEvent
from orchestrator.train.script.progress_facts import ProgressSnapshot
from tests.unit.core.builders import after, changed, pending, seats, started, stop, up


def running() -> Job:
    job = pending()
    job = after(job, started(job))
    simulated = tuple(replace(seat, gpu_uuids=(f"simulated-a-{seat.rank}",)) for seat in seats(job, ("a", "a")))
    placed = GangPlaced(job_id=job.id, at=2.0, gang=job.gang, seats=simulated)
    return after(job, placed, up(job))


def snapshot(busy: float, **parts: float) -> ProgressSnapshot:
    return ProgressSnapshot(step=9, recent_step_seconds=(1.0, 1.0, 5.0), busy_seconds=busy, metrics=parts)


def view(*ranks: ProgressSnapshot, job: Job | None = None) -> JobView:
    return job_view(job or running(), JobProgress(attempt=1, ranks=dict(enumerate(ranks))), None, "/logs")


def test_a_step_is_shown_at_the_time_that_it_was_done() -> None:
    heard = FirstStep(job_id=running().id, at=9.0, attempt=2, step=7, step_at=8.1, steps_lost=1)
    shown = event_view(StoredEvent(number=4, event=heard))
    assert (shown.at, shown.summary) == (8.1, "first new step 7, 1 step done again")


def test_an_error_is_shown_without_its_place_in_a_librarys_source() -> None:
    message = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51093"
    gone = RankExited(
        job_id=running().id,
        at=9.0,
        attempt=1,
        exit=Exit(rank=0, at=9.0, exit_code=None, signal=9, error_type="RuntimeError", error_message=message),
    )
    said = "rank 0 ended with signal 9 (RuntimeError: Connection closed by peer [127.0.0.1]:51093)"
    assert event_view(StoredEvent(number=4, event=gone)).summary == said


def test_events_agree_in_number_and_say_what_is_in_memory_only() -> None:
    job_id = running().id
    for event, said in (
        (ev.AttemptStarted(job_id=job_id, at=1.0, attempt=1, gang=1, nodes=("n",)), "attempt 1: 1 rank on 1 node"),
        (
            ev.AttemptStarted(job_id=job_id, at=1.0, attempt=2, gang=1, nodes=("n", "m")),
            "attempt 2: 2 ranks on 2 nodes",
        ),
        (ev.AttemptGone(job_id=job_id, at=1.0, attempt=2), "all processes of attempt 2 ended"),
        (ev.CheckpointSaved(job_id=job_id, at=1.0, attempt=1, step=7, path="/c"), "checkpoint of step 7 is complete"),
        (
            ev.CheckpointSaved(job_id=job_id, at=1.0, attempt=1, step=7, path=""),
            "snapshot of step 7 is complete, in memory only",
        ),
    ):
        assert event_view(StoredEvent(number=1, event=event)).summary == said


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


def test_on_real_gpus_processor_time_names_nobody() -> None:
    job = running()
    real = changed(job, seats=tuple(replace(seat, gpu_uuids=(f"GPU-{seat.rank}",)) for seat in job.seats))
    shown = view(snapshot(0.4), snapshot(0.8), job=real)
    assert shown.straggler is None
    assert [rank.own_seconds for rank in shown.gpus] == [None, None]
    measured = (
        snapshot(0.9, data_seconds=0.1, forward_seconds=0.2),
        snapshot(0.1, data_seconds=0.5, forward_seconds=0.2),
    )
    slow = view(*measured, job=real).straggler
    assert slow is not None
    assert slow.rank == 1


def test_nobody_is_named_before_all_have_reported_or_when_the_job_does_not_run() -> None:
    assert view(snapshot(0.4)).straggler is None
    job = running()
    ended = view(snapshot(0.4), snapshot(0.8), job=after(job, stop(job, StopPurpose.PAUSE)))
    assert ended.straggler is None
    assert ended.gpus[0].step_seconds is None


def test_stacks_of_a_rank_that_was_reached_and_of_one_that_was_not() -> None:
    frames = (Frame("pull", "/work/data.py", 7),)
    look = RankLook(rank=1, at=0.0, pid=7, state="T", threads=(Thread(name="MainThread", frames=frames),))
    shown = rank_stacks(1, look)
    assert (shown.pid, shown.state, shown.threads[0].frames) == (7, "T", ("pull (/work/data.py:7)",))
    assert "not reached" in rank_stacks(1, None).problem
