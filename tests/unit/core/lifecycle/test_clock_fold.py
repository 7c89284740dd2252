"""A step of the clock moves what a record measures or awaits, and nothing that has ended."""

from __future__ import annotations

from datetime import timedelta

import pytest

from orchestrator.core import events as ev
from orchestrator.core.job.record import Job
from orchestrator.core.lifecycle.advance import StopRanks, advance, desired_effect
from orchestrator.core.scheduler.durations import limit_left
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.core.stored import job_from_dict, job_to_dict
from tests.unit.core.builders import (
    T0,
    after,
    checkpoint,
    exited,
    failed,
    gone,
    lost,
    make_spec,
    pending,
    released,
    running,
    starting,
    stop,
    up,
)

STEPS = [-90_000.0, -3600.0, 7200.0, 90_000.0]


def stepped(job: Job, seconds: float, unmeasured: float = 0.0) -> Job:
    event = ev.ClockStepped(job_id=job.id, at=T0 + 40 + seconds, seconds=seconds, unmeasured=unmeasured)
    found = after(job, event)
    assert job_from_dict(job_to_dict(found)) == found
    return found


@pytest.mark.parametrize("seconds", STEPS)
def test_a_back_off_keeps_its_length(seconds: float) -> None:
    job = running()
    job = after(job, exited(job), failed(job, not_before=T0 + 60), gone(job))
    moved = stepped(job, seconds)
    assert advance(moved, T0 + 59 + seconds).wake_at == T0 + 60 + seconds
    (event,) = advance(moved, T0 + 60 + seconds).events
    assert isinstance(event, ev.AttemptStarted)


@pytest.mark.parametrize("seconds", STEPS)
def test_a_fence_keeps_its_length(seconds: float) -> None:
    job = running()
    job = after(job, lost(job, not_before=T0 + 30), failed(job, keep_gang=False, not_before=T0), released(job))
    moved = stepped(job, seconds)
    assert (moved.fenced_until, moved.not_before) == (T0 + 30 + seconds, T0 + 30 + seconds)
    assert stepped(running(), seconds).fenced_until == 0.0, "none stays none"


@pytest.mark.parametrize("seconds", STEPS)
def test_the_time_to_stop_keeps_its_length(seconds: float) -> None:
    job = running()
    job = after(job, stop(job, StopPurpose.CANCEL))
    before, moved = desired_effect(job), desired_effect(stepped(job, seconds))
    assert isinstance(before, StopRanks)
    assert isinstance(moved, StopRanks)
    assert moved.deadline == before.deadline + seconds


@pytest.mark.parametrize("seconds", STEPS)
def test_a_start_is_not_too_slow_because_of_the_clock(seconds: float) -> None:
    job = starting()
    limit = job.spec.health.startup_timeout.total_seconds()
    assert advance(stepped(job, seconds), T0 + limit + seconds).wake_at == T0 + 1 + limit + seconds


@pytest.mark.parametrize("seconds", STEPS)
def test_max_duration_counts_what_has_passed(seconds: float) -> None:
    job = running(pending(make_spec(max_duration=timedelta(hours=1))))
    moved = stepped(job, seconds)
    assert limit_left(moved, T0 + 100 + seconds) == limit_left(job, T0 + 100)
    assert advance(moved, T0 + 100 + seconds).events == ()
    (event,) = advance(moved, T0 + 3700 + seconds).events
    assert isinstance(event, ev.StopRequested)


def test_what_nothing_has_measured_is_not_counted_for_max_duration_and_changes_no_time() -> None:
    job = running(pending(make_spec(max_duration=timedelta(hours=1))))
    moved = stepped(job, 0.0, unmeasured=90_000.0)
    assert limit_left(moved, T0 + 90_100) == limit_left(job, T0 + 100)
    assert (moved.attempts, moved.state_since, moved.phase) == (job.attempts, job.state_since, job.phase)
    waiting = pending()
    assert after(waiting, ev.ClockStepped(job_id=waiting.id, at=T0, seconds=0.0, unmeasured=5.0)) is waiting


@pytest.mark.parametrize("seconds", STEPS)
def test_the_wait_for_a_root_cause_keeps_its_length(seconds: float) -> None:
    job = running(pending(make_spec(workers=2)))
    job = after(job, exited(job, rank=1, error_type="RuntimeError", error_message="Connection closed by peer"))
    until = advance(job, T0 + 10).wake_at
    assert until is not None
    assert advance(stepped(job, seconds), T0 + 10 + seconds).wake_at == until + seconds


def test_an_attempt_that_has_ended_keeps_its_times_and_the_present_one_moves() -> None:
    job = running()
    job = after(job, checkpoint(job, 4, path="/c/4"), exited(job), failed(job), gone(job))
    (restarted,) = advance(job, T0 + 100).events
    job = after(job, restarted)
    job = after(job, up(job, at=T0 + 101, attempt=2))
    moved = stepped(job, 3600.0)
    assert moved.attempts[0] == job.attempts[0]
    assert [moved.attempts[1].started_at, moved.attempts[1].running_at] == [T0 + 3700, T0 + 3701]
    assert (moved.state, moved.checkpoints.durable_at) == (JobState.RUNNING, T0 + 3605)
