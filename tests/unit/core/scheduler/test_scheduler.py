"""``decide``: the decisions in every state, the order in which jobs start, and the consequences of a stop."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.reasons import (
    BackingOff,
    ByLimit,
    ByUser,
    DoesNotFit,
    MadeRoom,
    NotEnoughFree,
    PlacedAnew,
    Queued,
    RanksSucceeded,
)
from orchestrator.core.lifecycle.advance import Ensure, KillRanks, ReleaseGang, StopRanks, desired_effect, request_stop
from orchestrator.core.lifecycle.failure import SETTLE_SECONDS
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.scheduler.shares import Sharing
from orchestrator.core.states import AttemptState, EndOrder, FailureClass, JobState, StopPurpose, StopScope
from orchestrator.core.stored import job_from_dict, job_to_dict
from orchestrator.spec.model import HealthSpec, RetrySpec
from tests.unit.core.builders import (
    ID,
    T0,
    after,
    changed,
    exited,
    failed,
    failure,
    gone,
    in_state,
    lost,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    started,
    starting,
    stop,
)

if TYPE_CHECKING:
    from typing import Any

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job

NOW = T0 + 12
A8 = node("a")

ADA = ByUser(name="ada")


def ask(*jobs: Job, now: float = NOW, known: tuple[Node, ...] = (A8,)) -> Commands:
    return decide(State(jobs={j.id: j for j in jobs}, nodes=nodes(*known)), now)


def only_event(*jobs: Job, now: float = NOW) -> ev.Event:
    (event,) = ask(*jobs, now=now).events
    return event


def waiting_job(name: str, sequence: int, **fields: Any) -> Job:
    return pending(make_spec(**fields), sequence=sequence, job_id=name)


def zeros(job: Job, at: float = T0 + 10, ordered: EndOrder | None = None) -> Job:
    return after(job, *(exited(job, r, exit_code=0, at=at, ordered=ordered) for r in range(job.num_workers)))


class TestQueue:
    """The choice among the waiting jobs."""

    def test_a_job_that_fits_is_started_in_a_gang_of_its_own(self) -> None:
        event = only_event(pending())
        assert event == ev.AttemptStarted(job_id=ID, at=NOW, attempt=1, gang=1, nodes=("a", "a"))

    def test_priority_goes_before_arrival(self) -> None:
        early, late = waiting_job("early-1", 1, workers=8), waiting_job("late-2", 2, workers=8, priority=60)
        commands = ask(early, late)
        assert [e.job_id for e in commands.events] == ["late-2"]
        assert commands.waiting == {"early-1": NotEnoughFree(gpus=8, cpus=8, free_gpus=0, free_cpus=56)}

    def test_a_new_priority_counts_for_a_job_that_waits_already(self) -> None:
        early, late = waiting_job("early-1", 1, workers=8), waiting_job("late-2", 2, workers=8)
        late = after(late, ev.JobUpdated(job_id=late.id, at=T0, by="ada", priority=51))
        assert [e.job_id for e in ask(early, late).events] == ["late-2"]

    def test_several_start_at_once_and_never_share_a_gpu(self) -> None:
        jobs = [waiting_job(f"job-{n}", n, workers=3) for n in (1, 2, 3)]
        commands = ask(*jobs)
        assert [e.job_id for e in commands.events] == ["job-1", "job-2"]
        assert "job-3" in commands.waiting

    def test_a_big_job_is_not_starved_by_small_ones_behind_it(self) -> None:
        holder = running(waiting_job("holder-0", 1, workers=4))
        big, small = waiting_job("big-1", 2, workers=8), waiting_job("small-2", 3, workers=1)
        assert [event.job_id for event in ask(holder, big, small).events] == ["small-2"]
        commands = ask(holder, big, small, now=T0 + 10 * Sharing().ageing)
        assert commands.events == []
        assert set(commands.waiting) == {"big-1", "small-2"}

    def test_a_job_that_can_never_fit_keeps_nothing_from_those_behind_it(self) -> None:
        giant, small = waiting_job("giant-1", 1, workers=9), waiting_job("small-2", 2, workers=1)
        commands = ask(giant, small)
        assert [e.job_id for e in commands.events] == ["small-2"]
        assert commands.waiting["giant-1"] == DoesNotFit(gpus=9, cpus=9)

    def test_processors_are_not_held_for_a_job_that_waits_for_gpus(self) -> None:
        holder = running(waiting_job("holder-0", 1, workers=8))
        big, small = waiting_job("big-1", 2, workers=8), waiting_job("small-2", 3, workers=1, gpu=0)
        assert [e.job_id for e in ask(holder, big, small).events] == ["small-2"]

    def test_a_back_off_is_waited_for_and_does_not_block_others(self) -> None:
        backing, other = changed(waiting_job("back-1", 1), not_before=NOW + 5), waiting_job("other-2", 2)
        commands = ask(backing, other)
        assert [e.job_id for e in commands.events] == ["other-2"]
        assert commands.wake_at == NOW + 5
        assert commands.waiting == {"back-1": BackingOff(seconds=5.0, cause=Queued())}

    def test_the_ranks_of_a_lost_node_are_given_time_to_end_themselves(self) -> None:
        commands = ask(changed(pending(), not_before=NOW + 30, fenced_until=NOW + 30))
        assert commands.events == []
        assert commands.wake_at == NOW + 30

    def test_a_job_that_comes_back_gets_the_next_attempt_in_the_next_gang(self) -> None:
        job = running()
        job = after(job, lost(job), failed(job), released(job))
        job = after(job, ev.JobRequeued(job_id=ID, at=T0, reason=fact_from("again")))
        event = only_event(job)
        assert isinstance(event, ev.AttemptStarted)
        assert (event.attempt, event.gang) == (2, 2)


class TestLive:
    """Jobs in the states STARTING and RUNNING."""

    @pytest.mark.parametrize("job", [starting(), running()], ids=["STARTING", "RUNNING"])
    def test_a_healthy_job_is_to_exist_and_to_be_watched(self, job: Job) -> None:
        assert ask(job).events == []
        assert desired_effect(job) == Ensure(ID, 1, 1)

    def test_when_every_rank_ended_with_zero_the_attempt_succeeded(self) -> None:
        assert only_event(zeros(running())) == ev.AttemptSucceeded(job_id=ID, at=NOW, attempt=1)

    def test_ranks_that_end_before_it_is_known_that_they_were_up_were_up(self) -> None:
        job = zeros(starting())
        event = only_event(job)
        assert event == ev.AttemptRunning(job_id=ID, at=NOW, attempt=1, pids=())
        assert isinstance(only_event(after(job, event)), ev.AttemptSucceeded)

    def test_zeros_after_a_request_to_stop_from_outside_are_no_success(self) -> None:
        runs = running(pending(make_spec(workers=1)))
        left = exited(runs, exit_code=0, at=T0 + 10, stop_seen_at=T0 + 9, stop_scope=StopScope.MACHINE)
        event = only_event(after(runs, left))
        assert isinstance(event, ev.AttemptFailed)
        assert (event.failure.failure_class, event.retry) == (FailureClass.PREEMPTION, True)

    def test_one_rank_that_ended_with_zero_is_not_enough(self) -> None:
        job = running()
        assert ask(after(job, exited(job, 0, exit_code=0))).events == []

    def test_after_success_the_gang_is_released_and_then_the_job_is_done(self) -> None:
        job = zeros(running())
        job = after(job, only_event(job))
        assert desired_effect(job) == ReleaseGang(ID, 1)
        event = only_event(after(job, released(job)))
        assert event == ev.JobFinished(
            job_id=ID, at=NOW, state=JobState.SUCCEEDED, reason=RanksSucceeded(), exit_code=0
        )

    def test_a_failure_is_judged_and_written_before_anything_is_killed(self) -> None:
        job = running()
        commands = ask(after(job, exited(job, 1, signal=9)))
        (event,) = commands.events
        assert isinstance(event, ev.AttemptFailed)
        assert (event.failure.rank, event.failed_at, event.retry, event.keep_gang) == (1, T0 + 10, True, True)

    def test_a_failure_that_is_not_tried_again_says_why(self) -> None:
        job = changed(running(), restarts={"infra": 10})
        event = only_event(after(job, exited(job, 1, signal=9)))
        assert isinstance(event, ev.AttemptFailed)
        assert not event.retry
        assert event.failure.sentence() == (
            "rank 1 was killed by SIGKILL; not tried again: 10 of 10 infra restarts used"
        )
        assert event.failure.rank == 1

    def test_while_the_root_is_not_known_it_asks_again(self) -> None:
        job = running()
        collateral = exited(job, error_type="RuntimeError", error_message="Connection closed by peer", at=NOW)
        commands = ask(after(job, collateral))
        assert commands.events == []
        assert commands.wake_at == NOW + SETTLE_SECONDS

    @pytest.mark.parametrize("job", [starting(), running()], ids=["STARTING", "RUNNING"])
    def test_a_lost_gang_fails_the_attempt(self, job: Job) -> None:
        event = only_event(after(job, lost(job)))
        assert isinstance(event, ev.AttemptFailed)
        assert (event.failure.failure_class, event.failure.sentence()) == (FailureClass.INFRA, "node a died")
        assert (event.retry, event.keep_gang) == (True, False)

    @pytest.mark.parametrize("vanish", [gone, released])
    @pytest.mark.parametrize("job", [starting(), running()], ids=["STARTING", "RUNNING"])
    def test_processes_that_are_gone_without_a_word_fail_the_attempt(self, job: Job, vanish: Any) -> None:
        event = only_event(after(job, vanish(job)))
        assert isinstance(event, ev.AttemptFailed)
        assert event.failure.sentence() == "its processes went away without an exit status"

    @pytest.mark.parametrize(("claimed", "recorded"), [(0.0, T0 + 1), (T0 + 5, T0 + 5), (T0 + 1e6, T0 + 9)])
    def test_a_failure_is_within_its_attempt_whatever_time_a_rank_claims(self, claimed: float, recorded: float) -> None:
        job = running()
        event = only_event(after(job, exited(job, exit_code=1, error_at=claimed)), now=T0 + 9)
        assert isinstance(event, ev.AttemptFailed)
        assert event.failed_at == recorded

    def test_a_start_that_takes_too_long_fails_the_attempt(self) -> None:
        job = starting(pending(make_spec(health=HealthSpec(startup_timeout=timedelta(minutes=1)))))
        assert ask(job, now=T0 + 60).wake_at == T0 + 61
        event = only_event(job, now=T0 + 61)
        assert isinstance(event, ev.AttemptFailed)
        assert (event.failure.code, event.keep_gang) == ("startup_timeout", False)

    def test_a_job_that_runs_too_long_is_stopped(self) -> None:
        job = running(pending(make_spec(max_duration=timedelta(minutes=1))))
        assert ask(job, now=T0 + 62).wake_at == T0 + 63
        event = only_event(job, now=T0 + 63)
        assert event == ev.StopRequested(
            job_id=ID, at=T0 + 63, purpose=StopPurpose.TIMEOUT, by=ByLimit(key="max_duration"), deadline=T0 + 93
        )

    def test_the_time_limit_counts_from_the_first_attempt(self) -> None:
        job = running(pending(make_spec(max_duration=timedelta(minutes=1))))
        job = after(job, failed(job), gone(job))
        job = after(job, started(job, gang=1, at=T0 + 50))
        assert isinstance(only_event(job, now=T0 + 63), ev.StopRequested)


class TestRecovering:
    """Jobs in the state RECOVERING."""

    def test_the_rest_of_the_attempt_is_killed_first(self) -> None:
        job = running()
        job = after(job, failed(job))
        assert ask(job).events == []
        assert desired_effect(job) == KillRanks(ID, 1, 1)

    def test_then_processes_start_again_in_the_same_gang(self) -> None:
        job = running()
        event = only_event(after(job, failed(job), gone(job)))
        assert event == ev.AttemptStarted(job_id=ID, at=NOW, attempt=2, gang=1, nodes=("a", "a"))

    def test_after_the_back_off(self) -> None:
        job = running()
        job = after(job, failed(job, not_before=NOW + 3), gone(job))
        commands = ask(job)
        assert (commands.events, commands.wake_at) == ([], NOW + 3)
        assert isinstance(only_event(job, now=NOW + 3), ev.AttemptStarted)

    @pytest.mark.parametrize("lose", [True, False])
    def test_a_gang_that_is_not_kept_is_released_and_the_job_placed_anew(self, lose: bool) -> None:
        job = running()
        job = after(job, failed(job, keep_gang=False, not_before=NOW + 3), gone(job))
        job = after(job, lost(job)) if lose else job
        assert desired_effect(job) == ReleaseGang(ID, 1)
        event = only_event(after(job, released(job)))
        assert event == ev.JobRequeued(job_id=ID, at=NOW, reason=PlacedAnew(cause=failure().cause), not_before=NOW + 3)

    def test_a_gang_that_is_lost_is_released_without_waiting_for_its_processes(self) -> None:
        job = running()
        assert desired_effect(after(job, failed(job), lost(job))) == ReleaseGang(ID, 1)

    @pytest.mark.parametrize(
        ("fields", "exit_code"),
        [({"exit_code": 3}, 3), ({"signal": 9, "exit_code": None}, 137), ({"exit_code": None}, 1)],
    )
    def test_without_another_try_the_job_fails_once_its_gang_is_gone(
        self, fields: dict[str, Any], exit_code: int
    ) -> None:
        job = running()
        job = after(job, failed(job, retry=False, keep_gang=False, failure=failure(**fields)))
        assert desired_effect(job) == KillRanks(ID, 1, 1)
        job = after(job, gone(job))
        assert desired_effect(job) == ReleaseGang(ID, 1)
        event = only_event(after(job, released(job)))
        assert isinstance(event, ev.JobFinished)
        assert (event.state, event.reason.sentence(), event.exit_code) == (
            JobState.FAILED,
            "rank 0 was killed by SIGKILL",
            exit_code,
        )


class TestDraining:
    """Jobs in the state DRAINING."""

    def drained(self, purpose: StopPurpose) -> Job:
        job = running()
        job = after(job, stop(job, purpose, by="ada"), gone(job))
        return after(job, released(job))

    def test_ranks_are_told_then_the_gang_is_released(self) -> None:
        job = running()
        job = after(job, stop(job, StopPurpose.CANCEL))
        assert desired_effect(job) == StopRanks(ID, 1, 1, T0 + 50)
        assert desired_effect(after(job, gone(job))) == ReleaseGang(ID, 1)

    def test_a_lost_gang_is_released_at_once(self) -> None:
        job = running()
        assert desired_effect(after(job, stop(job, StopPurpose.CANCEL), lost(job))) == ReleaseGang(ID, 1)

    def test_a_job_over_its_time_has_failed(self) -> None:
        event = only_event(self.drained(StopPurpose.TIMEOUT))
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.FAILED

    @pytest.mark.parametrize("purpose", [StopPurpose.PREEMPT, StopPurpose.RESIZE])
    def test_a_job_that_made_room_waits_again(self, purpose: StopPurpose) -> None:
        event = only_event(self.drained(purpose))
        assert event == ev.JobRequeued(job_id=ID, at=NOW, reason=MadeRoom(by=ADA))

    def test_a_job_that_made_room_on_a_lost_node_waits_until_its_ranks_are_gone_for_sure(self) -> None:
        job = running()
        job = after(job, stop(job, StopPurpose.PREEMPT), lost(job, not_before=NOW + 30), released(job))
        event = only_event(job)
        assert isinstance(event, ev.JobRequeued)
        assert event.not_before == NOW + 30

    @pytest.mark.parametrize("purpose", StopPurpose)
    def test_a_job_that_had_ended_by_itself_succeeded(self, purpose: StopPurpose) -> None:
        job = zeros(running(), at=T0 + 19)
        job = after(job, stop(job, purpose), gone(job), released(job))
        event = only_event(job)
        assert isinstance(event, ev.AttemptSucceeded), "its attempt ends as the job does"
        job = after(job, event)
        assert job.attempts[-1].state is AttemptState.SUCCEEDED
        event = only_event(job)
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.SUCCEEDED

    def test_what_is_known_late_of_an_attempt_that_was_lost_is_no_success(self) -> None:
        job = running()
        job = after(job, lost(job))
        job = after(job, only_event(job))
        assert job.attempts[-1].state is AttemptState.LOST
        job = zeros(job, at=T0 + 19)
        job = after(job, stop(job, StopPurpose.CANCEL), released(job))
        event = only_event(job)
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.CANCELLED

    def test_a_stop_ends_an_attempt_whose_processes_are_gone(self) -> None:
        job = after(running(), exited(running(), exit_code=1, error_message="Connection closed by peer"))
        job = after(job, gone(job), stop(job, StopPurpose.PAUSE))
        assert (job.attempts[-1].state, job.attempts[-1].ended_at) == (AttemptState.ABORTED, job.stop and job.stop.at)

    def test_a_rank_that_was_asked_to_stop_at_the_same_moment_has_not_ended_by_itself(self) -> None:
        runs = running(pending(make_spec(workers=1)))
        ended = exited(runs, exit_code=0, at=T0 + 20, stop_seen_at=T0 + 20, stop_scope=StopScope.RANK)
        job = after(runs, stop(runs, StopPurpose.CANCEL, at=T0 + 20), ended, gone(runs), released(runs))
        event = only_event(job)
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.CANCELLED

    @pytest.mark.parametrize("purpose", [StopPurpose.CANCEL, StopPurpose.PAUSE, StopPurpose.PREEMPT])
    def test_a_job_that_something_else_had_stopped_the_moment_before_did_not_succeed(
        self, purpose: StopPurpose
    ) -> None:
        runs = running(pending(make_spec(workers=1)))
        left = exited(runs, exit_code=0, at=T0 + 19, stop_seen_at=T0 + 18, stop_scope=StopScope.RANK)
        job = after(runs, left, stop(runs, purpose, at=T0 + 20), gone(runs), released(runs))
        event = only_event(job)
        assert not isinstance(event, ev.JobFinished) or event.state is JobState.CANCELLED

    def test_a_job_that_saved_and_ended_with_zero_when_it_was_told_did_not_succeed(self) -> None:
        job = running()
        job = zeros(after(job, stop(job, StopPurpose.PAUSE)), at=T0 + 21, ordered=EndOrder.STOP)
        job = after(job, stop(job, StopPurpose.CANCEL, at=T0 + 22), gone(job), released(job))
        event = only_event(job)
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.CANCELLED

    def test_a_success_that_was_known_before_the_stop_stands_whatever_the_clocks_say(self) -> None:
        job = zeros(running(), at=T0 + 25)  # by the clock of another node, after the stop
        job = after(job, stop(job, StopPurpose.CANCEL), ev.AttemptSucceeded(job_id=ID, at=T0 + 20, attempt=1))
        assert desired_effect(job) == ReleaseGang(ID, 1)
        event = only_event(after(job, released(job)))
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.SUCCEEDED


class TestRequestStop:
    """Stops requested by a person or by the scheduler."""

    @pytest.mark.parametrize(
        ("state", "purpose", "expected"),
        [
            (JobState.PENDING, StopPurpose.CANCEL, ev.JobFinished),
            (JobState.PENDING, StopPurpose.PAUSE, ev.JobSuspended),
            (JobState.PENDING, StopPurpose.PREEMPT, None),
            (JobState.SUSPENDED, StopPurpose.CANCEL, ev.JobFinished),
            (JobState.SUSPENDED, StopPurpose.PAUSE, None),
            (JobState.STARTING, StopPurpose.CANCEL, ev.StopRequested),
            (JobState.RUNNING, StopPurpose.PREEMPT, ev.StopRequested),
            (JobState.RECOVERING, StopPurpose.PAUSE, ev.StopRequested),
            (JobState.DRAINING, StopPurpose.CANCEL, ev.StopRequested),
            (JobState.DRAINING, StopPurpose.PAUSE, None),
            (JobState.DRAINING, StopPurpose.PREEMPT, None),
            (JobState.SUCCEEDED, StopPurpose.CANCEL, None),
            (JobState.FAILED, StopPurpose.CANCEL, None),
            (JobState.CANCELLED, StopPurpose.PAUSE, None),
        ],
    )
    def test_what_it_leads_to(self, state: JobState, purpose: StopPurpose, expected: type[ev.Event] | None) -> None:
        job = in_state(state)
        found = request_stop(job, purpose, ADA, NOW)
        assert [type(e) for e in found] == ([expected] if expected else [])
        for event in found:
            assert after(job, event) != job

    def test_a_running_job_gets_its_own_time_to_save(self) -> None:
        job = running(pending(make_spec(stop_duration=timedelta(seconds=7))))
        (event,) = request_stop(job, StopPurpose.CANCEL, ADA, NOW)
        assert isinstance(event, ev.StopRequested)
        assert event.deadline == NOW + 7

    def test_a_job_whose_end_is_decided_is_left_to_it(self) -> None:
        job = running()
        assert request_stop(after(job, failed(job, retry=False)), StopPurpose.PAUSE, ADA, NOW) == []
        won = after(job, ev.AttemptSucceeded(job_id=ID, at=NOW, attempt=1))
        assert request_stop(won, StopPurpose.CANCEL, ADA, NOW) == []


def test_effects_follow_from_the_record_alone() -> None:
    job = running()
    for record in (starting(), job, after(job, failed(job)), after(job, stop(job, StopPurpose.PAUSE))):
        assert desired_effect(job_from_dict(job_to_dict(record))) == desired_effect(record)


def test_a_retry_without_limit_is_still_bounded_by_progress() -> None:
    job = running(pending(make_spec(retry=RetrySpec(max_no_progress=2))))
    for expected in (True, True, False):
        event = only_event(after(job, exited(job, signal=9)))
        assert isinstance(event, ev.AttemptFailed)
        assert event.retry is expected
        job = after(job, exited(job, signal=9), event, gone(job))
        if expected:
            job = running(job, gang=1)


def test_asking_again_takes_the_earliest_time() -> None:
    commands = Commands()
    for at in (None, 5.0, 3.0, 9.0, None):
        commands.ask_again(at)
    assert commands.wake_at == 3.0
