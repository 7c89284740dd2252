"""Jobs that may not start yet: their start time, their matrix's limit, a failure of another of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.events import MatrixCell
from orchestrator.core.facts.reasons import AwaitsTime, Cancelled, MatrixAtLimit, Paused
from orchestrator.core.facts.requesters import ByHold, ByMatrix
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.advance import request_resume
from orchestrator.core.scheduler.conditions import held_back
from orchestrator.core.scheduler.scheduler import Commands, State, decide, waiting_order
from orchestrator.core.sentences import sentence
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.core.stored.job_record import event_body, event_from, job_from_dict, job_to_dict
from tests.unit.core.builders import T0, after, make_spec, node, nodes, pending, running, submission

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 100


def cell(index: int, **fields: Any) -> MatrixCell:
    return MatrixCell(matrix_id="grid-aaaaaa", name="grid", index=index, count=9, values={"lr": 0.1}, **fields)


def member(index: int, *, spec: Any = None, **fields: Any) -> Job:
    job_id = JobId(f"grid-{'bcdefghij'[index] * 6}")
    fields = {"max_concurrent": 2, **fields}
    return pending(spec or make_spec(workers=1), sequence=index + 1, job_id=job_id, matrix=cell(index, **fields))


def ask(*jobs: Job, now: float = NOW, **state: Any) -> Commands:
    return decide(State(jobs={j.id: j for j in jobs}, nodes=nodes(node("a")), **state), now)


def test_no_more_jobs_of_a_matrix_start_than_it_says() -> None:
    jobs = [member(n) for n in range(4)]
    commands = ask(*jobs)
    assert [e.job_id for e in commands.events if isinstance(e, ev.AttemptStarted)] == [jobs[0].id, jobs[1].id]
    fact = MatrixAtLimit(matrix="grid-aaaaaa", limit=2)
    assert commands.waiting[jobs[2].id] == fact
    assert sentence(fact) == "grid-aaaaaa runs at most 2 jobs at a time (matrix.max_concurrent)"


def test_running_jobs_count_and_one_that_has_run_goes_first() -> None:
    first, *rest = [member(n) for n in range(4)]
    stopped = replace(rest[2], attempts=running(rest[2]).attempts)
    commands = ask(running(first), rest[0], rest[1], stopped)
    assert [e.job_id for e in commands.events if isinstance(e, ev.AttemptStarted)] == [stopped.id]


def test_a_paused_job_or_one_that_waits_for_another_holds_no_place() -> None:
    first, second, third = (member(n, max_concurrent=1) for n in range(3))
    paused = after(first, ev.JobSuspended(job_id=first.id, at=T0, by=ByHold(name="ada")))
    assert held_back([paused, second, third], {second.id}, NOW).waiting == {}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), max_size=9), st.integers(1, 4))
def test_the_limit_holds_and_is_used(alive: list[bool], limit: int) -> None:
    jobs = [member(n, max_concurrent=limit) for n in range(len(alive))]
    jobs = [running(job) if is_alive else job for job, is_alive in zip(jobs, alive, strict=True)]
    free = len(jobs) - sum(alive) - len(held_back(jobs, (), NOW).waiting)
    assert free == min(len(jobs) - sum(alive), max(0, limit - sum(alive)))


def test_a_job_waits_for_its_start_time_and_the_loop_is_woken_then() -> None:
    at = datetime.fromtimestamp(NOW + 60, UTC)
    early = pending(replace(make_spec(workers=1), start_at=at), sequence=1, job_id="early-bbbbbb")
    behind = pending(make_spec(workers=8), sequence=2, job_id="behind-cccccc")
    commands = ask(early, behind)
    assert [e.job_id for e in commands.events] == ["behind-cccccc"]
    assert commands.waiting[early.id] == AwaitsTime(start_at=NOW + 60)
    assert commands.wake_at == NOW + 60
    assert [e.job_id for e in ask(early, now=NOW + 60).events] == [early.id]
    state = State(jobs={early.id: early, behind.id: behind}, nodes=nodes(node("a")))
    assert waiting_order(state, NOW) == [behind]


def test_after_its_first_attempt_the_start_time_is_over() -> None:
    at = datetime.fromtimestamp(NOW + 60, UTC)
    job = pending(replace(make_spec(workers=1), start_at=at), sequence=1, job_id="early-bbbbbb")
    assert held_back([replace(job, attempts=running(job).attempts)], (), NOW).waiting == {}


def test_a_failure_ends_the_other_jobs_of_a_matrix_that_fails_fast_in_the_same_step() -> None:
    waits, runs = member(0, fail_fast=True), running(member(1, fail_fast=True))
    other = pending(make_spec(workers=1), sequence=9, job_id="other-cccccc")
    commands = ask(waits, runs, other, failed_fast={"grid-aaaaaa": JobId("grid-zzzzzz")})
    by = ByMatrix(matrix="grid-aaaaaa", job="grid-zzzzzz")
    finished, stop = commands.events
    assert isinstance(finished, ev.JobFinished)
    assert (finished.job_id, finished.state, finished.reason) == (waits.id, JobState.CANCELLED, Cancelled(by=by))
    assert isinstance(stop, ev.StopRequested)
    assert (stop.job_id, stop.purpose, stop.by) == (runs.id, StopPurpose.CANCEL, by)
    assert sentence(by) == "fail_fast of grid-aaaaaa: grid-zzzzzz failed"
    # Asked for once: the next decision goes on with what else there is.
    later = ask(after(runs, stop), other, failed_fast={"grid-aaaaaa": JobId("grid-zzzzzz")})
    assert [type(e) for e in later.events] == [ev.AttemptStarted]


def test_a_job_submitted_on_hold_waits_until_it_is_released() -> None:
    held = pending(replace(make_spec(workers=1), hold=True), sequence=1, job_id="held-bbbbbb", user="ada")
    assert (held.state, held.reason) == (JobState.SUSPENDED, Paused(by=ByHold(name="ada")))
    assert ask(held).events == []
    assert sentence(held.reason) == "held by ada; `orch release` puts it into the queue"
    released = after(held, *(request_resume(held, "ada", NOW) or ()))
    assert [type(e) for e in ask(released).events] == [ev.AttemptStarted]


def test_a_place_in_a_matrix_is_stored_with_its_types() -> None:
    values = {"lr": 0.1, "deep": True, "opt": "adam", "n": 3}
    event = submission(make_spec(), matrix=replace(cell(0), values=values))
    again = event_from(event.kind, event_body(event), job_id=event.job_id, at=event.at, cause=event.cause)
    assert again == event
    job = member(3, fail_fast=True)
    assert job_from_dict(job_to_dict(job)) == job
    row = job_to_dict(job)
    del row["matrix"]  # as earlier versions wrote it
    assert job_from_dict(row).submission.matrix is None
