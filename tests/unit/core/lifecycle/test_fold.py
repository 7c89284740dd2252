"""The fold: duplicates and late facts change nothing, rules hold, and each event leaves the record it should."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from orchestrator.core import events as ev
from orchestrator.core.errors import BrokenRuleError, CoreError
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.facts.reasons import ByUser
from orchestrator.core.job.record import Replacing, Restarting
from orchestrator.core.lifecycle.failure import decide_retry
from orchestrator.core.lifecycle.fold import STORY_LENGTH, fold
from orchestrator.core.states import AttemptState, FailureClass, JobState, StopPurpose
from tests.unit.core import strategies
from tests.unit.core.builders import (
    ID,
    T0,
    after,
    checkpoint,
    exited,
    failed,
    failure,
    finished,
    gone,
    in_state,
    lost,
    make_spec,
    pending,
    released,
    running,
    seats,
    started,
    starting,
    stop,
    submission,
)

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

TERMINAL = [s for s in JobState if s.is_terminal]


@settings(max_examples=150, deadline=None)
@given(strategies.jobs, strategies.facts)
def test_folding_an_event_twice_changes_nothing(job: Job, event: ev.Event) -> None:
    try:
        once = fold(job, event)
    except CoreError:
        return
    assert fold(once, event) is once or isinstance(event, ev.ClockStepped), "only the loop writes it, with the clock"


@settings(max_examples=60, deadline=None)
@given(strategies.jobs, strategies.facts)
def test_a_fold_counts_one_version_or_changes_nothing(job: Job, event: ev.Event) -> None:
    try:
        once = fold(job, event)
    except CoreError:
        return
    assert once is job or (
        once.version == job.version + 1 and once.story[-1].startswith(f"{event.at:.3f} {event.kind}")
    )


@settings(max_examples=150, deadline=None)
@given(strategies.histories)
def test_whatever_happens_the_record_keeps_its_rules(events: list[ev.Event]) -> None:
    job = pending()
    for event in events:
        try:
            following = fold(job, event)
        except CoreError:
            continue
        if job.state.is_terminal:
            assert following.state is job.state
        if following.state.is_terminal or following.state in (JobState.PENDING, JobState.SUSPENDED):
            assert not following.gang_open
            assert not following.attempt_live
        assert [a.number for a in following.attempts] == sorted({a.number for a in following.attempts})
        assert (following.stop is not None) == (following.state is JobState.DRAINING)
        assert all(following.restarts.get(kind, 0) >= count for kind, count in job.restarts.items())
        if not isinstance(event, ev.AttemptFailed):
            assert following.restarts == job.restarts, "nothing but a failure counts, and no clean-up takes back"
        if not isinstance(event, ev.AttemptFailed | ev.CheckpointSaved):
            assert following.no_progress == job.no_progress
        job = following


@pytest.mark.parametrize("state", TERMINAL)
@settings(max_examples=40, deadline=None)
@given(strategies.facts)
def test_terminal_is_final(state: JobState, event: ev.Event) -> None:
    job = in_state(state)
    later = fold(job, event)
    if not isinstance(event, ev.JobNoted):
        assert later is job
    assert later.state is state
    assert later.ended_at == job.ended_at


def test_a_submission_cannot_happen_to_a_job_that_exists() -> None:
    with pytest.raises(CoreError, match="JobSubmitted cannot happen"):
        fold(pending(), submission())


def test_a_submission_begins_a_job_that_waits() -> None:
    job = pending(make_spec(priority=70), sequence=9, resume_from="old@5")
    assert (job.state, job.submission.sequence, job.version, job.priority) == (JobState.PENDING, 9, 1, 70)
    assert (job.state_since, job.submission.submitted_at, job.submission.resume_from) == (T0, T0, "old@5")
    assert job.attempt is None
    assert job.attempt_number == 0
    assert job.started_at is None


def test_the_story_keeps_the_last_events_and_their_causes() -> None:
    job = pending()
    for n in range(STORY_LENGTH + 5):
        job = fold(job, ev.JobUpdated(job_id=ID, at=T0 + n, by="ada", priority=n, cause="api"))
    assert len(job.story) == STORY_LENGTH
    assert job.story[-1] == f"{T0 + STORY_LENGTH + 4:.3f} job_updated [api]"


def test_the_life_of_a_job_that_succeeds() -> None:
    job = running()
    assert (job.state, job.attempt_live, job.gang_open, job.pids) == (JobState.RUNNING, True, True, (200, 201))
    assert job.started_at == T0 + 3
    job = after(job, exited(job, 0, exit_code=0), exited(job, 1, exit_code=0))
    job = fold(job, ev.AttemptSucceeded(job_id=ID, at=T0 + 11, attempt=1))
    assert (job.state, job.succeeded, job.attempt_live, job.gang_open) == (JobState.RUNNING, True, False, True)
    job = after(job, released(job), finished(job, JobState.SUCCEEDED, exit_code=0))
    assert (job.state, job.exit_code, job.ended_at, job.failure) == (JobState.SUCCEEDED, 0, T0 + 30, None)
    assert job.attempts[0].state is AttemptState.SUCCEEDED
    assert job.attempts[0].ended_at == T0 + 11


def test_a_failed_attempt_is_followed_by_one_in_the_same_gang() -> None:
    job = running()
    job = after(job, exited(job, signal=9), failed(job), gone(job))
    assert (job.state, job.gang_open, job.attempt_live, job.restarts) == (
        JobState.RECOVERING,
        True,
        False,
        {"infra": 1},
    )
    assert job.attempts[0].state is AttemptState.FAILED
    again = fold(job, started(job, gang=1))
    assert (again.state, again.gang, again.attempt_number, again.exits) == (JobState.STARTING, 1, 2, ())
    assert again.seats == job.seats, "the actors stay where they are"


def test_a_fresh_gang_forgets_the_seats_and_the_troubles_of_the_old_one() -> None:
    job = running()
    noted = fold(job, ev.JobNoted(job_id=ID, at=T0 + 4, note=fact_from("a is silent"), degraded=True))
    job = after(noted, lost(noted), failed(noted), released(noted))
    job = fold(job, ev.JobRequeued(job_id=ID, at=T0 + 23, reason=fact_from("to be placed again")))
    job = fold(job, started(job))
    assert noted.degraded
    assert (job.degraded, job.seats, job.gang, job.gang_lost) == (False, (), 2, False)


@pytest.mark.parametrize(
    ("lose", "failure_class", "state"),
    [
        (True, FailureClass.INFRA, AttemptState.LOST),
        (False, FailureClass.INFRA, AttemptState.FAILED),
        (True, FailureClass.USER, AttemptState.FAILED),
    ],
)
def test_an_attempt_is_lost_when_its_gang_was(lose: bool, failure_class: FailureClass, state: AttemptState) -> None:
    job = running()
    job = after(job, lost(job)) if lose else job
    job = fold(job, failed(job, failure=failure(failure_class)))
    assert job.attempts[-1].state is state
    assert isinstance(job.phase, Replacing if lose else Restarting)


def test_only_the_last_failure_keeps_its_log_lines() -> None:
    job = running()
    job = after(job, failed(job, failure=failure(log_tail=("boom",))), gone(job))
    assert job.attempts[0].failure is not None
    assert job.attempts[0].failure.log_tail == ("boom",)
    job = fold(job, started(job, gang=1))
    assert job.attempts[0].failure == failure(), "the events keep the lines"
    assert job.failure is not None
    assert job.failure.log_tail == ("boom",)


class TestRules:
    """States that no order of events may lead to."""

    def test_no_second_attempt_while_one_lives(self) -> None:
        job = running()
        job = fold(job, failed(job))
        with pytest.raises(BrokenRuleError, match=r"second attempt.*attempt_failed"):
            fold(job, started(job, gang=1))

    def test_no_new_gang_while_one_is_open(self) -> None:
        job = running()
        job = after(job, failed(job), gone(job))
        with pytest.raises(BrokenRuleError, match="second attempt"):
            fold(job, started(job, gang=2))

    def test_no_attempt_in_a_gang_that_is_lost(self) -> None:
        job = running()
        job = after(job, failed(job), gone(job), lost(job))
        with pytest.raises(BrokenRuleError, match="gang that is gone"):
            fold(job, started(job, gang=1))

    @pytest.mark.parametrize(
        "event",
        [
            ev.JobRequeued(job_id=ID, at=T0 + 40, reason=fact_from("again")),
            ev.JobSuspended(job_id=ID, at=T0 + 40, by=ByUser(name="ada")),
            finished(pending(), JobState.FAILED),
        ],
        ids=lambda e: e.kind,
    )
    @pytest.mark.parametrize("state", [s for s in JobState if s.may_hold_gang])
    def test_nothing_is_let_go_before_the_gang_is_confirmed_gone(self, event: ev.Event, state: JobState) -> None:
        with pytest.raises(BrokenRuleError, match="not confirmed gone"):
            fold(in_state(state), event)

    def test_an_end_is_a_terminal_state(self) -> None:
        with pytest.raises(BrokenRuleError, match="no end"):
            fold(pending(), finished(pending(), JobState.SUSPENDED))


class TestLateFacts:
    """Facts of an older attempt or gang, and facts that arrive too late."""

    def test_facts_of_an_older_attempt_change_nothing(self) -> None:
        first = running()
        job = after(first, failed(first), gone(first))
        job = fold(job, started(job, gang=1))
        for event in (
            exited(first),
            gone(first),
            failed(first),
            checkpoint(first, 99),
            ev.AttemptRunning(job_id=ID, at=T0, attempt=1, pids=()),
            ev.AttemptSucceeded(job_id=ID, at=T0, attempt=1),
            ev.FirstStep(job_id=ID, at=T0, attempt=1, step=1, step_at=T0, steps_lost=0),
            started(pending()),
        ):
            assert fold(job, event) is job, event.kind

    def test_facts_of_an_older_gang_change_nothing(self) -> None:
        first = running()
        job = after(first, lost(first), failed(first), released(first))
        job = fold(job, ev.JobRequeued(job_id=ID, at=T0 + 23, reason=fact_from("again")))
        job = fold(job, started(job))
        placed = ev.GangPlaced(job_id=ID, at=T0, gang=1, seats=seats(first, first.nodes))
        for event in (placed, lost(first), released(first)):
            assert fold(job, event) is job, event.kind

    def test_a_gang_that_is_released_takes_no_seats_and_no_exits(self) -> None:
        job = running()
        job = after(job, failed(job), gone(job), released(job))
        placed = ev.GangPlaced(job_id=ID, at=T0, gang=1, seats=seats(job, ("a", "a")))
        assert fold(job, placed) is job
        assert fold(job, exited(job)) is job
        assert fold(job, lost(job)) is job

    def test_before_the_first_attempt_facts_of_attempts_change_nothing(self) -> None:
        job = pending()
        assert fold(job, ev.FirstStep(job_id=ID, at=T0, attempt=0, step=1, step_at=T0, steps_lost=0)) is job
        assert fold(job, exited(job)) is job
        assert fold(job, gone(job)) is job

    def test_a_rank_ends_once(self) -> None:
        job = running()
        job = fold(job, exited(job, 0, signal=9))
        assert fold(job, exited(job, 0, exit_code=0)) is job

    def test_a_success_that_comes_after_the_verdict_is_too_late(self) -> None:
        job = running()
        job = fold(job, failed(job))
        assert fold(job, ev.AttemptSucceeded(job_id=ID, at=T0 + 12, attempt=1)) is job

    def test_a_verdict_that_comes_after_the_success_is_too_late(self) -> None:
        job = fold(running(), ev.AttemptSucceeded(job_id=ID, at=T0 + 12, attempt=1))
        assert fold(job, failed(job)) is job

    def test_the_reason_of_a_lost_gang_outlives_what_comes_late(self) -> None:
        job = starting()
        job = after(job, lost(job), ev.AttemptRunning(job_id=ID, at=T0 + 12, attempt=1, pids=(1, 2)))
        assert (job.state, job.reason.sentence()) == (JobState.RUNNING, "node a died")


class TestStops:
    """Pause, cancel and the scheduler's own stops."""

    @pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
    def test_a_stop_drains(self, state: JobState) -> None:
        job = in_state(state)
        job = fold(job, stop(job, StopPurpose.PREEMPT, by="scheduler"))
        assert job.state is JobState.DRAINING
        assert job.stop is not None
        assert (job.stop.purpose, job.stop.by, job.stop.at) == (StopPurpose.PREEMPT, ByUser(name="scheduler"), T0 + 20)
        assert job.reason.sentence() == "making room (scheduler); its processes have time to save"

    def test_a_stronger_stop_takes_over_but_gives_no_more_time(self) -> None:
        job = running()
        job = after(job, stop(job, StopPurpose.PAUSE, at=T0 + 20), stop(job, StopPurpose.CANCEL, at=T0 + 40))
        assert job.stop is not None
        assert (job.stop.purpose, job.stop.at, job.stop.deadline) == (StopPurpose.CANCEL, T0 + 20, T0 + 50)

    @pytest.mark.parametrize("purpose", StopPurpose)
    def test_nothing_overrides_a_cancel(self, purpose: StopPurpose) -> None:
        job = running()
        job = fold(job, stop(job, StopPurpose.CANCEL))
        assert fold(job, stop(job, purpose, at=T0 + 25)) is job

    def test_a_job_whose_end_is_decided_is_not_stopped_any_more(self) -> None:
        lost_cause = running()
        lost_cause = fold(lost_cause, failed(lost_cause, retry=False))
        won = fold(running(), ev.AttemptSucceeded(job_id=ID, at=T0 + 12, attempt=1))
        for job in (lost_cause, won):
            assert fold(job, stop(job, StopPurpose.PAUSE)) is job

    @pytest.mark.parametrize(
        ("purpose", "state"), [(StopPurpose.PREEMPT, AttemptState.PREEMPTED), (StopPurpose.PAUSE, AttemptState.ABORTED)]
    )
    def test_a_drained_attempt_ends_as_what_it_was_drained_for(self, purpose: StopPurpose, state: AttemptState) -> None:
        job = running()
        job = fold(job, stop(job, purpose))
        assert job.attempts[-1].state is AttemptState.DRAINING
        job = fold(job, gone(job))
        assert (job.attempts[-1].state, job.attempts[-1].ended_at, job.pids) == (state, T0 + 21, ())

    def test_a_gang_that_is_released_takes_its_attempt_along(self) -> None:
        job = running()
        job = after(job, stop(job, StopPurpose.PAUSE), released(job))
        assert (job.attempt_live, job.gang_open, job.nodes) == (False, False, ())
        assert job.attempts[-1].state is AttemptState.ABORTED

    def test_a_paused_job_is_clean_when_it_comes_back(self) -> None:
        job = running()
        job = after(job, failed(job, not_before=T0 + 500), gone(job), stop(job, StopPurpose.PAUSE), released(job))
        job = fold(job, ev.JobSuspended(job_id=ID, at=T0 + 23, by=ByUser(name="ada")))
        assert (job.state, job.stop, job.exits) == (JobState.SUSPENDED, None, ())
        job = fold(job, ev.JobResumed(job_id=ID, at=T0 + 24, by="ada"))
        assert (job.state, job.not_before, job.reason.sentence()) == (JobState.PENDING, 0.0, "resumed by ada")
        assert job.restarts == {"infra": 1}, "clean-up never resets a budget"

    def test_a_resume_does_not_outrun_the_ranks_of_a_lost_node(self) -> None:
        job = running()
        job = after(job, stop(job, StopPurpose.PAUSE), lost(job, not_before=T0 + 90), released(job))
        job = after(
            job,
            ev.JobSuspended(job_id=ID, at=T0 + 23, by=ByUser(name="a")),
            ev.JobResumed(job_id=ID, at=T0 + 24, by="a"),
        )
        assert job.fenced_until == T0 + 90

    def test_a_job_that_returns_to_the_queue_waits_for_its_fence(self) -> None:
        job = running()
        job = after(job, lost(job, not_before=T0 + 90), failed(job, keep_gang=False), released(job))
        requeued = ev.JobRequeued(job_id=ID, at=T0 + 23, reason=fact_from("a node was lost"), not_before=T0 + 30)
        assert fold(job, requeued).not_before == T0 + 90

    def test_of_two_nodes_that_are_cut_off_the_later_fence_counts_and_the_first_reason(self) -> None:
        job = running()
        job = after(job, lost(job, not_before=T0 + 30), lost(job, not_before=T0 + 90, reason="node b died"))
        assert (job.fenced_until, job.reason.sentence()) == (T0 + 90, "node a died")
        assert fold(job, lost(job, not_before=T0 + 30)) is job

    def test_a_time_limit_is_the_failure_whatever_failed_before(self) -> None:
        job = running()
        job = after(job, failed(job), gone(job))
        job = running(job, gang=1)
        job = fold(job, stop(job, StopPurpose.TIMEOUT))
        job = after(job, released(job), finished(job, JobState.FAILED, reason="too long"))
        assert job.failure is not None
        assert (job.failure.failure_class, job.failure.sentence()) == (FailureClass.TIMEOUT, "too long")


class TestCheckpoints:
    """The checkpoint that counts, in memory and on storage."""

    def test_a_newer_one_counts_and_an_older_one_does_not(self) -> None:
        job = running()
        job = fold(job, checkpoint(job, 10, path="/ckpt/10", at=T0 + 5))
        assert (job.checkpoints.step, job.checkpoints.at, job.checkpoints.path) == (10, T0 + 5, "/ckpt/10")
        assert job.attempts[-1].checkpoint_step == 10
        assert fold(job, checkpoint(job, 9, path="/ckpt/9")) is job
        assert fold(job, checkpoint(job, 10)) is job

    def test_one_in_memory_counts_at_once_and_its_copy_on_storage_when_it_is_there(self) -> None:
        job = running()
        job = after(job, checkpoint(job, 10, at=T0 + 5), checkpoint(job, 20, at=T0 + 6))
        assert (job.checkpoints.step, job.checkpoints.path, job.checkpoints.durable_at) == (20, "", None)
        job = fold(job, checkpoint(job, 10, path="/ckpt/10", at=T0 + 7))
        assert (job.checkpoints.step, job.checkpoints.at) == (20, T0 + 6)
        assert (job.checkpoints.path, job.checkpoints.durable_step, job.checkpoints.durable_at) == (
            "/ckpt/10",
            10,
            T0 + 7,
        )
        job = fold(job, checkpoint(job, 20, path="/ckpt/20", at=T0 + 8))
        assert (job.checkpoints.path, job.checkpoints.durable_step) == ("/ckpt/20", 20)

    def test_what_was_in_memory_goes_with_the_gang(self) -> None:
        job = running()
        job = after(job, checkpoint(job, 10, path="/ckpt/10", at=T0 + 5), checkpoint(job, 20, at=T0 + 6))
        job = after(job, lost(job), failed(job), released(job))
        assert (job.checkpoints.step, job.checkpoints.at, job.checkpoints.path) == (10, T0 + 5, "/ckpt/10")
        assert fold(job, checkpoint(job, 20, at=T0 + 6)) is job, "told again, it does not come back"
        job = fold(job, ev.JobRequeued(job_id=ID, at=T0 + 23, reason=fact_from("again")))
        job = fold(job, started(job))
        assert job.attempts[-1].start_step == 10
        job = fold(job, checkpoint(job, 15, path="/ckpt/15"))
        assert (job.checkpoints.step, job.checkpoints.path) == (15, "/ckpt/15")

    def test_step_zero_counts_when_there_was_none(self) -> None:
        job = running()
        assert fold(job, checkpoint(job, 0, path="/ckpt/0")).checkpoints.at is not None

    def test_restarts_without_a_newer_checkpoint_are_counted_until_there_is_one(self) -> None:
        job = running()
        for n in (1, 2):
            job = after(job, failed(job), gone(job))
            assert job.no_progress == n
            job = running(job, gang=1)
        job = fold(job, checkpoint(job, 5))
        assert job.no_progress == 0
        assert fold(job, failed(job)).no_progress == 1

    def test_an_attempt_that_made_progress_before_it_was_preempted_counts_as_progress(self) -> None:
        job = running()
        job = after(job, failed(job), gone(job))
        job = running(job, gang=1)
        job = after(job, checkpoint(job, 5, path="/ckpt/5"), stop(job, StopPurpose.PREEMPT), released(job))
        job = fold(job, ev.JobRequeued(job_id=ID, at=T0 + 23, reason=fact_from("made room")))
        assert job.no_progress == 0


def test_the_first_new_step_of_an_attempt_is_kept_once() -> None:
    job = running()
    first = ev.FirstStep(job_id=ID, at=T0 + 4, attempt=1, step=11, step_at=T0 + 3.5, steps_lost=2)
    job = fold(job, first)
    attempt = job.attempt
    assert attempt is not None
    assert (attempt.first_step, attempt.first_step_at, attempt.steps_lost) == (11, T0 + 3.5, 2)


def test_notes_are_kept_ten_at_a_time_and_say_a_thing_once() -> None:
    job = pending()
    for n in range(12):
        job = fold(job, ev.JobNoted(job_id=ID, at=T0 + n, note=fact_from(f"note {n}")))
    assert job.notes == tuple(fact_from(f"note {n}") for n in range(2, 12))
    assert fold(job, ev.JobNoted(job_id=ID, at=T0 + 99, note=fact_from("note 11"))) is job


def test_a_note_about_a_job_that_ended_is_kept() -> None:
    job = in_state(JobState.SUCCEEDED)
    assert fold(job, ev.JobNoted(job_id=ID, at=T0 + 99, note=fact_from("outputs copied"))).notes == (
        fact_from("outputs copied"),
    )


def test_a_new_priority_counts() -> None:
    job = pending()
    assert fold(job, ev.JobUpdated(job_id=ID, at=T0, by="ada", priority=80)).priority == 80
    assert fold(job, ev.JobUpdated(job_id=ID, at=T0, by="ada", priority=50)) is job


def test_before_its_first_attempt_a_job_without_a_fixed_size_is_as_small_as_it_may_be() -> None:
    assert pending(make_spec(workers="auto")).num_workers == 1


def script_saved(job: Job, digest: str, *, at: float, step: int = 0, attempt: int | None = None) -> ev.CheckpointSaved:
    return ev.CheckpointSaved(
        job_id=job.id, at=at, attempt=attempt or job.attempt_number, step=step, path="/w/ckpt.pt", digest=digest
    )


def restarted(job: Job, *, at: float) -> Job:
    job = after(job, failed(job), gone(job, at=at))
    up = ev.AttemptRunning(job_id=job.id, at=at + 2, attempt=job.attempt_number + 1, pids=(1,))
    return after(job, started(job, at=at + 1, gang=job.gang), up)


def test_a_newer_file_of_the_same_name_is_progress_and_the_same_one_is_none() -> None:
    job = running()
    for number in range(1, 6):
        job = after(job, script_saved(job, f"content {number}", at=100.0 * number))
        assert job.attempts[-1].progressed
        assert (job.checkpoints.at, job.checkpoints.durable_at) == (100.0 * number, 100.0 * number)
        job = restarted(job, at=100.0 * number + 1)
        assert job.no_progress == 1
    for number in range(1, 4):
        job = after(job, script_saved(job, "content 5", at=900.0 + number))
        assert not job.attempts[-1].progressed
        job = restarted(job, at=1000.0 + number)
        assert job.no_progress == 1 + number
    assert not decide_retry(job, failure(), 2000.0).retry
    assert decide_retry(after(job, script_saved(job, "content 6", at=2000.0)), failure(), 2001.0).retry


def test_a_file_that_is_found_when_the_next_attempt_begins_is_what_that_one_begins_with() -> None:
    job = restarted(running(), at=50.0)
    found = after(job, script_saved(job, "late", at=40.0, step=300, attempt=1))
    assert (found.checkpoints.step, found.attempts[-1].start_step, found.no_progress) == (300, 300, 0)
    assert not found.attempts[-1].progressed, "it was the attempt before that saved it"
    assert after(found, script_saved(found, "older", at=30.0, step=200, attempt=1)) == found
    stranger = after(found, ev.CheckpointSaved(job_id=job.id, at=60.0, attempt=1, step=500, path="/c/step-500"))
    assert stranger == found, "orch's own checkpoints of an older attempt are fenced"


def test_the_first_file_of_an_attempt_is_progress_by_whatever_clock_it_was_written() -> None:
    job = running()
    job = restarted(after(job, script_saved(job, "by a node that is ahead", at=400.0, step=100)), at=101.0)
    saved = after(job, script_saved(job, "by one that is not", at=120.0, step=110))
    assert (saved.checkpoints.step, saved.attempts[-1].progressed, saved.no_progress) == (110, True, 0)
    assert after(saved, script_saved(saved, "older", at=110.0, step=105)) == saved, "the same clock has written both"
