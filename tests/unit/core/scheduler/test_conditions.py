"""Jobs that may not start yet: their start time, their matrix's limit, a failure of another job of the matrix."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.events import MatrixCell
from orchestrator.core.facts.reasons import AwaitsTime, ByHold, ByMatrix, Cancelled, MatrixAtLimit, Paused
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Succeeded
from orchestrator.core.lifecycle.advance import request_resume
from orchestrator.core.scheduler.live_jobs import LiveJobs, check
from orchestrator.core.scheduler.scheduler import Commands, State, decide, waiting_order
from orchestrator.core.states import EndCondition, JobState, StopPurpose
from tests.support.records import replace
from tests.unit.core.builders import T0, after, gone, make_spec, node, nodes, pending, released, running

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
    assert fact.sentence() == "grid-aaaaaa runs at most 2 jobs at a time (matrix.max_concurrent)"


PAUSED = ev.Prerequisite(job_id=JobId(f"grid-{'b' * 6}"), on=EndCondition.SUCCESS)


def test_a_paused_job_or_one_that_waits_for_another_holds_no_place() -> None:
    first, second, third = (member(n, max_concurrent=1) for n in range(3))
    paused = after(first, ev.JobSuspended(job_id=first.id, at=T0, by=ByHold(name="ada")))
    needs = replace(second, submission=replace(second.submission, prerequisites=(PAUSED,)))
    found = check([needs, third], (), {paused.id: paused}, {}, NOW)
    assert ([job.id for job in found.released], list(found.waiting)) == ([third.id], [second.id])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), max_size=9), st.integers(1, 4))
def test_the_limit_holds_and_is_used(alive: list[bool], limit: int) -> None:
    jobs = [member(n, max_concurrent=limit) for n in range(len(alive))]
    jobs = [running(job) if is_alive else job for job, is_alive in zip(jobs, alive, strict=True)]
    waiting = [job for job in jobs if job.state is JobState.PENDING]
    found = check(waiting, [job for job in jobs if job.state.may_hold_gang], {}, {}, NOW)
    assert len(found.released) + len(found.waiting) == len(waiting)
    assert len(found.released) == min(len(jobs) - sum(alive), max(0, limit - sum(alive)))


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


ENDS = [JobState.SUCCEEDED, JobState.FAILED, None]


def random_member(choose: random.Random, number: int) -> Job:
    """Return a job with any conditions, on those before it or on jobs that have ended."""
    spec = make_spec(workers=1, priority=choose.choice([40, 50]))
    if choose.random() < 0.4:
        spec = replace(spec, start_at=datetime.fromtimestamp(NOW + choose.randint(-50, 150), UTC))
    needed = [f"job-{choose.randrange(number)}"] if number and choose.random() < 0.4 else []
    needed += [f"ended-{choose.randrange(3)}"] if choose.random() < 0.2 else []
    prerequisites = tuple(ev.Prerequisite(job_id=JobId(i), on=choose.choice(list(EndCondition))) for i in needed)
    limit = choose.choice([None, 1, 1, 2])
    matrix = cell(number, max_concurrent=limit) if choose.random() < 0.6 else None
    if matrix is not None:
        matrix = replace(matrix, matrix_id=f"grid-{choose.choice('ab') if limit == 1 else limit}")
    return pending(spec, sequence=number, job_id=f"job-{number}", prerequisites=prerequisites, matrix=matrix)


@pytest.mark.parametrize("seed", range(12))
def test_conditions_that_are_kept_are_those_counted_anew(seed: int) -> None:
    choose = random.Random(seed)
    ended: dict[JobId, JobState | None] = {JobId(f"ended-{n}"): state for n, state in enumerate(ENDS)}
    jobs = LiveJobs(random_member(choose, n) for n in range(12))
    now = NOW
    for _ in range(40):
        anew = LiveJobs(jobs.values())
        kept, new = jobs.release(ended, now), anew.release(ended, now)
        assert (kept.waiting, kept.wake_at) == (new.waiting, new.wake_at)
        assert {job.id: fact for job, fact in kept.failing} == {job.id: fact for job, fact in new.failing}
        waits = {i for i, job in jobs.items() if job.state is JobState.PENDING}
        grouped = {job.id for entries in jobs.waiting.groups.values() for _, _, job in entries}
        assert grouped == waits - kept.waiting.keys() - {job.id for job, _ in kept.failing}
        assert all(jobs.condition(i) == kept.waiting.get(i) for i in jobs)
        now += choose.choice([0, 0, 20])
        job = jobs[choose.choice(list(jobs))]
        act = choose.random()
        if job.state is JobState.PENDING:
            jobs[job.id] = running(job) if act < 0.6 else replace(job, priority=choose.choice([40, 50, 60]))
        elif job.state is JobState.RUNNING and act < 0.4:
            jobs[job.id] = back_in_the_queue(job)
        elif job.state is JobState.RUNNING:
            jobs[job.id] = replace(job, phase=Succeeded())
        else:
            ended[job.id] = job.state
            del jobs[job.id]


def back_in_the_queue(job: Job) -> Job:
    by = ByHold(name="ada")
    stop = ev.StopRequested(job_id=job.id, at=NOW, purpose=StopPurpose.PREEMPT, by=by, deadline=NOW + 9)
    job = after(job, stop, gone(job), released(job))
    return after(job, ev.JobRequeued(job_id=job.id, at=NOW, reason=job.reason))


def test_after_its_first_attempt_the_start_time_is_over() -> None:
    at = datetime.fromtimestamp(NOW + 60, UTC)
    job = pending(replace(make_spec(workers=1), start_at=at), sequence=1, job_id="early-bbbbbb")
    assert check([replace(job, attempts=running(job).attempts)], (), {}, {}, NOW).waiting == {}


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
    assert by.sentence() == "fail_fast of grid-aaaaaa: grid-zzzzzz failed"
    # The stop is requested once: the next decision continues with the other jobs.
    later = ask(after(runs, stop), other, failed_fast={"grid-aaaaaa": JobId("grid-zzzzzz")})
    assert [type(e) for e in later.events] == [ev.AttemptStarted]


def test_a_job_submitted_on_hold_waits_until_it_is_released() -> None:
    held = pending(replace(make_spec(workers=1), hold=True), sequence=1, job_id="held-bbbbbb", user="ada")
    assert (held.state, held.reason) == (JobState.SUSPENDED, Paused(by=ByHold(name="ada")))
    assert ask(held).events == []
    assert held.reason.sentence() == "held by ada; `orch release` puts it into the queue"
    released = after(held, *(request_resume(held, "ada", NOW) or ()))
    assert [type(e) for e in ask(released).events] == [ev.AttemptStarted]
