"""Consequences when a rank has left after a stop request that orch did not send, and others still run."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.job.record import Job, Leaving
from orchestrator.core.lifecycle.advance import (
    FOLLOWING_SECONDS,
    Ensure,
    KillRanks,
    ReleaseGang,
    Step,
    StopRanks,
    advance,
    desired_effect,
)
from orchestrator.core.states import AttemptState, EndOrder, JobState, StopPurpose, StopScope
from orchestrator.core.stored import job_from_dict, job_to_dict
from tests.support.records import replace
from tests.unit.core.builders import (
    T0,
    after,
    exited,
    gone,
    lost,
    make_spec,
    pending,
    released,
    running,
    starting,
    stop,
)

LEFT_AT = T0 + 10
LEFT: dict[str, Any] = {
    "exit_code": 0,
    "stop_seen_at": T0 + 9,
    "stop_scope": StopScope.RANK,
    "last_step": 11,
    "at": LEFT_AT,
}
ASKED_AT = LEFT_AT + FOLLOWING_SECONDS


@pytest.fixture
def job() -> Job:
    """Return a job of two ranks of which rank 1 has left."""
    up = running(pending(make_spec(workers=2)))
    return after(up, exited(up, rank=1, **LEFT))


def asked(job: Job) -> ev.RanksAsked:
    (event,) = advance(job, ASKED_AT).events
    assert isinstance(event, ev.RanksAsked)
    return event


def test_the_others_are_asked_once_they_had_time_to_leave_by_themselves(job: Job) -> None:
    assert advance(job, ASKED_AT - 1) == Step(wake_at=ASKED_AT)
    event = asked(job)
    until = LEFT_AT + job.spec.stop_duration.total_seconds()
    assert (event.attempt, event.deadline) == (1, until)
    assert desired_effect(job) == Ensure(job.id, 1, 1)
    leaving = after(job, event)
    assert desired_effect(leaving) == StopRanks(job.id, 1, 1, until)
    assert (leaving.state, leaving.reason) == (JobState.RUNNING, event.reason)
    assert event.reason.sentence() == (
        "rank 1 ended at step 11 after a request to stop that orch did not send; the other ranks are asked to stop"
    )
    assert advance(leaving, ASKED_AT + 1) == Step(wake_at=until), "once"
    assert after(leaving, event) is leaving


def test_when_they_have_followed_the_next_attempt_starts_in_the_same_gang(job: Job) -> None:
    followed = after(job, asked(job), exited(job, rank=0, **{**LEFT, "at": ASKED_AT + 2, "stop_seen_at": ASKED_AT + 1}))
    (event,) = advance(followed, ASKED_AT + 2).events
    assert isinstance(event, ev.AttemptFailed)
    assert (event.failure.rank, event.failure.code, event.retry, event.keep_gang) == (
        1,
        "stopped_from_outside",
        True,
        True,
    )
    again = after(followed, event)
    assert isinstance(desired_effect(again), KillRanks)
    assert again.attempts[-1].state is AttemptState.FAILED


def test_one_that_stays_is_killed_at_the_deadline(job: Job) -> None:
    leaving = after(job, asked(job))
    (event,) = advance(leaving, asked(job).deadline).events
    assert isinstance(event, ev.AttemptFailed)
    assert isinstance(desired_effect(after(leaving, event)), KillRanks)


def test_a_lost_gang_is_not_asked(job: Job) -> None:
    (event,) = advance(after(job, lost(job)), ASKED_AT).events
    assert isinstance(event, ev.AttemptFailed)
    leaving = after(job, asked(job), lost(job))
    assert desired_effect(leaving) is None
    (event,) = advance(leaving, ASKED_AT + 1).events
    assert isinstance(event, ev.AttemptFailed)


def test_a_stop_of_orchs_own_takes_over(job: Job) -> None:
    leaving = after(job, asked(job))
    drains = after(leaving, stop(leaving, StopPurpose.PAUSE))
    assert drains.state is JobState.DRAINING
    assert drains.stop is not None
    assert desired_effect(drains) == StopRanks(job.id, 1, 1, drains.stop.deadline)
    assert isinstance(desired_effect(after(drains, gone(drains))), ReleaseGang)


def test_a_rank_that_fails_by_itself_asks_nobody() -> None:
    up = running(pending(make_spec(workers=2)))
    (event,) = advance(after(up, exited(up, rank=1)), ASKED_AT).events
    assert isinstance(event, ev.AttemptFailed)


def test_while_ranks_start_nobody_is_asked() -> None:
    begins = starting(pending(make_spec(workers=2)))
    step = advance(after(begins, exited(begins, rank=1, **LEFT)), ASKED_AT)
    assert step.events == ()


def test_it_is_stored(job: Job) -> None:
    leaving = after(job, asked(job))
    assert isinstance(leaving.phase, Leaving)
    assert job_from_dict(job_to_dict(leaving)) == leaving
    assert "asked_until" not in job_to_dict(job) or job_to_dict(job)["asked_until"] is None


@pytest.mark.parametrize("skew", [-90_000.0, -1.9, -0.5, 0.0, 0.5, 90_000.0])
@pytest.mark.parametrize("purpose", [StopPurpose.PAUSE, StopPurpose.CANCEL, StopPurpose.PREEMPT])
def test_whether_a_rank_ended_because_of_a_stop_is_a_fact_and_no_comparison_of_clocks(
    purpose: StopPurpose, skew: float
) -> None:
    job = running(pending(make_spec(workers=1)))
    job = after(job, stop(job, purpose, at=T0 + 20))
    end = {"exit_code": 0, "at": T0 + 20.8 + skew}
    asked = after(job, exited(job, **end, ordered=EndOrder.STOP), gone(job), released(job))
    (event,) = advance(asked, T0 + 25).events
    assert not isinstance(event, ev.AttemptSucceeded)
    assert after(asked, event).state is not JobState.SUCCEEDED
    by_itself = after(job, exited(job, **end), gone(job))
    (event,) = advance(by_itself, T0 + 25).events
    assert isinstance(event, ev.AttemptSucceeded)


@pytest.mark.parametrize("order", list(EndOrder))
def test_no_order_makes_a_success(order: EndOrder) -> None:
    job = running(pending(make_spec(workers=1)))
    job = after(job, stop(job, StopPurpose.PAUSE), exited(job, exit_code=0, ordered=order), gone(job), released(job))
    (event,) = advance(job, T0 + 25).events
    assert isinstance(event, ev.JobSuspended)


@pytest.mark.parametrize("skew", [-90_000.0, 90_000.0])
def test_a_wait_after_an_end_counts_from_when_the_daemon_learnt_of_it(skew: float) -> None:
    up = running(pending(make_spec(workers=2)))
    end = exited(up, rank=1, **{**LEFT, "at": LEFT_AT + skew})
    job = after(up, replace(end, at=LEFT_AT))
    assert job.exits[0].at == LEFT_AT + skew
    assert advance(job, ASKED_AT - 1) == Step(wake_at=ASKED_AT)
