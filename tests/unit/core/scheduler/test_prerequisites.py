"""A job that depends on others: its start, the reasons why it waits, and ends of others that rule out its start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.events import Prerequisite
from orchestrator.core.facts.reasons import AwaitsJob, ByUser, PrerequisiteUnmet
from orchestrator.core.ids import JobId
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.states import EndCondition, JobState
from tests.unit.core.builders import T0, after, failed, make_spec, node, nodes, pending, running

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 100
FIRST = JobId("first-aaaaaa")
SUCCESS, FAILURE, ANY = EndCondition.SUCCESS, EndCondition.FAILURE, EndCondition.ANY


def dependent(on: EndCondition = SUCCESS, *others: str, **fields: Any) -> Job:
    needed = (Prerequisite(job_id=FIRST, on=on), *(Prerequisite(job_id=JobId(o), on=on) for o in others))
    return pending(make_spec(workers=1), sequence=9, job_id="second-bbbbbb", prerequisites=needed, **fields)


def first(**fields: Any) -> Job:
    return pending(make_spec(workers=8), sequence=1, job_id=FIRST, **fields)


def ask(*jobs: Job, ended: dict[Any, JobState | None] | None = None) -> Commands:
    return decide(State(jobs={j.id: j for j in jobs}, nodes=nodes(node("a")), ended=ended or {}), NOW)


def test_it_waits_while_the_other_job_lives() -> None:
    commands = ask(running(first()), dependent())
    fact = AwaitsJob(job=FIRST, on=SUCCESS, state=JobState.RUNNING)
    assert (commands.events, commands.waiting["second-bbbbbb"]) == ([], fact)
    assert fact.sentence() == "waiting for first-aaaaaa (RUNNING) to succeed"


def test_it_claims_nothing_while_it_waits() -> None:
    behind = pending(make_spec(workers=8), sequence=10, job_id="behind-cccccc")
    waits = after(first(), ev.JobSuspended(job_id=FIRST, at=T0, by=ByUser(name="ada")))
    commands = ask(waits, dependent(), behind)
    assert [event.job_id for event in commands.events] == ["behind-cccccc"]


@pytest.mark.parametrize(
    ("on", "state", "met"),
    [
        (SUCCESS, JobState.SUCCEEDED, True),
        (SUCCESS, JobState.FAILED, False),
        (SUCCESS, JobState.CANCELLED, False),
        (FAILURE, JobState.SUCCEEDED, False),
        (FAILURE, JobState.FAILED, True),
        (FAILURE, JobState.CANCELLED, False),
        (ANY, JobState.SUCCEEDED, True),
        (ANY, JobState.FAILED, True),
        (ANY, JobState.CANCELLED, True),
    ],
)
def test_the_other_jobs_end_starts_it_or_fails_it_at_once(on: EndCondition, state: JobState, *, met: bool) -> None:
    (event,) = ask(dependent(on), ended={FIRST: state}).events
    if met:
        assert isinstance(event, ev.AttemptStarted)
    else:
        unmet = PrerequisiteUnmet(job=FIRST, on=on, state=state)
        assert event == ev.JobFinished(job_id=JobId("second-bbbbbb"), at=NOW, state=JobState.FAILED, reason=unmet)
        assert after(dependent(on), event).state is JobState.FAILED


def test_a_job_whose_record_is_gone_can_fulfil_nothing() -> None:
    (event,) = ask(dependent(ANY), ended={FIRST: None}).events
    assert isinstance(event, ev.JobFinished)
    assert event.reason.sentence() == "depends on first-aaaaaa to end, whose record was removed"


def test_all_of_several_must_have_ended_and_one_wrong_end_is_enough() -> None:
    job = dependent(SUCCESS, "other-cccccc", "third-dddddd")
    live = running(first())
    waiting = ask(live, job, ended={JobId("other-cccccc"): JobState.SUCCEEDED, JobId("third-dddddd"): JobState.PENDING})
    assert waiting.waiting[job.id].sentence() == "waiting for first-aaaaaa (RUNNING) to succeed, and for 1 other job"
    commands = ask(live, job, ended={JobId("other-cccccc"): JobState.PENDING, JobId("third-dddddd"): JobState.FAILED})
    (event,) = commands.events
    assert isinstance(event, ev.JobFinished)
    assert event.reason.sentence() == "depends on third-dddddd to succeed, which ended FAILED"


def test_once_it_has_started_its_dependencies_count_no_more() -> None:
    job = running(dependent())
    back = after(job, failed(job, keep_gang=False), ev.GangReleased(job_id=job.id, at=T0 + 12, gang=1))
    requeued = ask(back, ended={FIRST: None}).events
    assert [event.kind for event in requeued] == ["job_requeued"]
    (event,) = ask(after(back, *requeued), ended={FIRST: None}).events
    assert isinstance(event, ev.AttemptStarted)
