"""A forced cancel: the one end without a gang that is confirmed gone. It is never a success, and nothing undoes it."""

from __future__ import annotations

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByForce, ByUser, Cancelled
from orchestrator.core.job.record import Job
from orchestrator.core.lifecycle.advance import FORCE_SECONDS, advance, desired_effect, ending_since, request_force
from orchestrator.core.states import AttemptState, JobState, StopPurpose
from orchestrator.core.stored import event_body, event_from, job_from_dict, job_to_dict
from tests.unit.core.builders import T0, after, exited, failed, gone, in_state, lost, released, running, starting, stop

NOW = T0 + 1000.0


def zeros(job: Job) -> list[ev.RankExited]:
    return [exited(job, rank=rank, exit_code=0) for rank in range(job.num_workers)]


def ending() -> dict[str, Job]:
    """Return jobs of which nothing but the end of the gang is missing."""
    up = running()
    won = ev.AttemptSucceeded(job_id=up.id, at=T0 + 11, attempt=1)
    return {
        "draining": after(up, stop(up, StopPurpose.CANCEL)),
        "draining, processes gone": after(up, stop(up, StopPurpose.CANCEL), gone(up)),
        "draining, lost": after(up, stop(up, StopPurpose.PREEMPT), lost(up)),
        "draining, all ended well": after(up, stop(up, StopPurpose.CANCEL), *zeros(up), won),
        "finishing": after(up, *zeros(up), won),
        "restarting": after(up, exited(up), failed(up)),
        "replacing": after(up, exited(up), failed(up, keep_gang=False)),
        "giving up": after(up, exited(up), failed(up, retry=False)),
    }


@pytest.mark.parametrize("name", ending())
def test_a_gang_is_given_up_when_its_end_is_overdue_and_the_job_is_cancelled_for_good(name: str) -> None:
    job = ending()[name]
    since = ending_since(job)
    assert since is not None
    early = request_force(job, "root", since + FORCE_SECONDS - 1)
    assert not any(isinstance(event, ev.GangAbandoned) for event in early)
    (given_up,) = request_force(job, "root", since + FORCE_SECONDS)
    assert isinstance(given_up, ev.GangAbandoned)
    again = event_from(given_up.kind, event_body(given_up), job_id=job.id, at=given_up.at, cause="")
    assert again == given_up

    draining = after(job, given_up)
    assert (draining.state, draining.gang_open, draining.succeeded) == (JobState.DRAINING, False, False)
    assert job_from_dict(job_to_dict(draining)) == draining
    assert desired_effect(draining) is None
    (end,) = advance(draining, NOW).events
    ended = after(draining, end)
    assert (ended.state, ended.reason) == (JobState.CANCELLED, Cancelled(by=ByForce(name="root")))
    assert ended.attempts[-1].state is not AttemptState.SUCCEEDED
    assert "root by force: nothing has confirmed that its ranks have ended" in ended.reason.sentence()
    for late in (*zeros(job), gone(job), released(job), ev.AttemptSucceeded(job_id=job.id, at=NOW, attempt=1)):
        assert after(ended, late) is ended, "what is reported later changes nothing"
        assert after(draining, late).state is JobState.DRAINING
        (then,) = advance(after(draining, late), NOW).events
        assert isinstance(then, ev.JobFinished)
        assert then.state is JobState.CANCELLED


@pytest.mark.parametrize("job", [starting(), running()], ids=["starting", "running"])
def test_ranks_that_may_run_are_killed_first(job: Job) -> None:
    (order,) = request_force(job, "root", NOW)
    assert order == ev.StopRequested(
        job_id=job.id, at=NOW, purpose=StopPurpose.CANCEL, by=ByUser(name="root"), deadline=NOW
    )
    killed = after(job, order)
    assert request_force(killed, "root", NOW + FORCE_SECONDS - 1) == []
    assert isinstance(request_force(killed, "root", NOW + FORCE_SECONDS)[0], ev.GangAbandoned)


def test_a_stop_that_is_under_way_gets_no_more_time() -> None:
    up = running()
    slow = after(
        up,
        ev.StopRequested(job_id=up.id, at=NOW, purpose=StopPurpose.CANCEL, by=ByUser(name="ada"), deadline=NOW + 300),
    )
    (order,) = request_force(slow, "root", NOW + 5)
    now = after(slow, order).stop
    assert now is not None
    assert (now.at, now.deadline) == (NOW, NOW + 5)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.SUSPENDED])
def test_a_job_that_holds_nothing_is_cancelled_as_ever(state: JobState) -> None:
    (end,) = request_force(in_state(state), "root", NOW)
    assert isinstance(end, ev.JobFinished)
    assert end.state is JobState.CANCELLED


def test_a_gang_that_was_given_up_is_no_other_gang() -> None:
    job = ending()["replacing"]
    other = ev.GangAbandoned(job_id=job.id, at=NOW, gang=job.gang + 1, by=ByForce(name="root"))
    assert after(job, other) is job
    waits = after(job, released(job))
    late = ev.GangAbandoned(job_id=job.id, at=NOW, gang=job.gang, by=ByForce(name="root"))
    assert after(waits, late) is waits, "its gang was confirmed gone meanwhile"
