"""Elastic jobs give back their ranks beyond the smallest size before anything is preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsRoom, ByShrinking
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.elastic import FRESH_SECONDS
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.states import StopPurpose
from orchestrator.spec.model import ElasticWorkers
from tests.unit.core.builders import T0, after, checkpoint, gone, make_spec, node, nodes, pending, released, running, up

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 400
NODES = nodes(node("a", gpus=8))


def elastic(name: str = "elastic", ranks: int = 8, *, saved_at: float = NOW - 5, least: int = 2, **keys: Any) -> Job:
    """Return an elastic job that has run on ``ranks`` GPUs of node a since T0 + 3, and has just saved."""
    spec = make_spec(workers=ElasticWorkers(min=least, max=8), **keys)
    job = running(pending(spec, sequence=1, job_id=name), nodes=("a",) * ranks)
    return fold(job, checkpoint(job, 7, path="/c/7", at=saved_at))


def waits(ranks: int, name: str = "head", sequence: int = 9, **keys: Any) -> Job:
    return pending(make_spec(workers=ranks, **keys), sequence=sequence, job_id=name)


def ask(*jobs: Job, now: float = NOW) -> Commands:
    return decide(State(jobs={job.id: job for job in jobs}, nodes=NODES), now)


def shrinks(commands: Commands) -> dict[str, int]:
    found = [event for event in commands.events if isinstance(event, ev.StopRequested)]
    assert all(event.purpose is StopPurpose.RESIZE for event in found)
    return {event.job_id: event.by.ranks for event in found if isinstance(event.by, ByShrinking)}


def test_it_shrinks_by_what_is_needed_and_both_go_on() -> None:
    job, head = elastic(), waits(3)
    commands = ask(job, head)
    (event,) = commands.events
    assert isinstance(event, ev.StopRequested)
    assert event.by == ByShrinking(job="head", ranks=5, instead_of=8)
    assert commands.waiting["head"] == AwaitsRoom(jobs=("elastic",))
    job = after(job, event)
    assert "to run on 5 ranks instead of 8: head waits for the rest" in job.reason.sentence()
    again = ask(job, head)
    assert (again.events, again.waiting["head"]) == ([], AwaitsRoom(jobs=("elastic",)))
    job = after(job, gone(job), released(job))
    starts = {e.job_id: len(e.nodes) for e in ask(job, head).events if isinstance(e, ev.AttemptStarted)}
    assert starts == {"elastic": 5, "head": 3}


def test_nothing_is_preempted_where_shrinking_is_enough() -> None:
    low = running(pending(make_spec(workers=3, priority=10), job_id="low"), nodes=("a",) * 3)
    assert shrinks(ask(elastic(ranks=5), low, waits(2, priority=60))) == {"elastic": 3}
    stops = [e.job_id for e in ask(elastic(ranks=5), low, waits(6, priority=60)).events]
    assert "low" in stops, "but where it is not"


@pytest.mark.parametrize(
    ("job", "head"),
    [
        (elastic(), waits(7)),
        (elastic(ranks=8, least=8), waits(1)),
        (elastic(saved_at=NOW - FRESH_SECONDS - 1), waits(3)),
        (elastic(priority=60), waits(3)),
        (elastic(), waits(3, nodes=("b",))),
    ],
    ids=["not enough", "as small as it gets", "no fresh checkpoint", "higher priority", "no use"],
)
def test_it_keeps_what_it_has(job: Job, head: Job) -> None:
    assert ask(job, head).events == []


def test_it_is_left_alone_for_a_while_after_each_start() -> None:
    job = elastic(saved_at=T0 + 200)
    assert ask(job, waits(3), now=T0 + 210).events == []


def test_of_several_those_shrink_that_lose_least_and_no_more_than_needed() -> None:
    first, second = elastic("first", 4, saved_at=NOW - 9), elastic("second", 4, saved_at=NOW - 2)
    assert shrinks(ask(first, second, waits(2))) == {"second": 2}
    assert shrinks(ask(first, second, waits(3))) == {"second": 2, "first": 3}


def test_what_is_left_over_when_it_starts_again_is_its_own() -> None:
    job, head = elastic(), waits(3)
    job = after(job, *ask(job, head).events)
    job = after(job, gone(job), released(job))
    (start,) = ask(job).events
    assert isinstance(start, ev.AttemptStarted)
    assert len(start.nodes) == 8, "the head is gone"
    job = after(job, start)
    assert after(job, up(job, attempt=job.attempt_number)).num_workers == 8
