"""Idle reclaim: jobs on GPUs that have all been idle for long give way to a job that does not fit."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsRoom, BackingOff, ByIdleReclaim, ByShrinking, ByUser, MadeRoom
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.scheduler.shares import Sharing
from orchestrator.core.states import StopPurpose
from orchestrator.spec.model import ElasticWorkers
from tests.unit.core.builders import T0, after, gone, make_spec, node, nodes, pending, released, running, stop

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 7200
NODES = nodes(node("a", gpus=4))


def runs(job_id: str, ranks: int = 2, **keys: Any) -> Job:
    return running(pending(make_spec(workers=ranks, **keys), job_id=job_id), nodes=("a",) * ranks, at=T0)


def waits(ranks: int = 2, **keys: Any) -> Job:
    return pending(make_spec(workers=ranks, **keys), sequence=9, job_id="new", at=NOW - 60)


def ask(*jobs: Job, limit: float | None = 1800.0, now: float = NOW, **idle: float) -> Commands:
    """Return a decision; ``idle`` has the seconds for which jobs have been idle."""
    since = {job.id: now - idle[job.id] for job in jobs if job.id in idle}
    return decide(
        State(jobs={j.id: j for j in jobs}, nodes=NODES, sharing=Sharing(reclaim_idle=limit), idle=since), now
    )


def stops(commands: Commands) -> list[str]:
    return [event.job_id for event in commands.events if isinstance(event, ev.StopRequested)]


def test_the_idle_job_stops_and_both_say_so() -> None:
    idle, busy = runs("idle"), runs("busy")
    commands = ask(idle, busy, waits(), idle=1800)
    (asked,) = commands.events
    assert isinstance(asked, ev.StopRequested)
    assert (asked.job_id, asked.purpose, asked.by) == (
        "idle",
        StopPurpose.PREEMPT,
        ByIdleReclaim(job="new", seconds=1800),
    )
    assert commands.waiting["new"] == AwaitsRoom(jobs=("idle",))
    told = after(idle, asked).reason.sentence()
    assert told == "making room for new: all GPUs of this job had been idle for 30m; its processes have time to save"
    assert ask(after(idle, asked), busy, waits(), idle=1801).events == [], "it is asked once"


@pytest.mark.parametrize(
    ("keys", "limit", "seconds", "stopped"),
    [
        ({}, 1800.0, 1799.0, False),
        ({}, None, 7000.0, False),
        ({"reclaim_idle": timedelta(minutes=10)}, None, 600.0, True),
        ({"reclaim_idle": timedelta(hours=1)}, 1800.0, 1800.0, False),
        ({"preemptible": False}, 1800.0, 1800.0, False),
        ({"min_runtime": timedelta(hours=3)}, 1800.0, 1800.0, False),
    ],
)
def test_when_it_stops(keys: dict[str, Any], limit: float | None, seconds: float, stopped: bool) -> None:
    commands = ask(runs("idle", **keys), runs("busy"), waits(), limit=limit, idle=seconds)
    assert stops(commands) == (["idle"] if stopped else [])


def test_nothing_stops_where_none_waits_or_where_it_would_not_be_enough() -> None:
    assert ask(runs("idle"), runs("busy"), idle=7000).events == []
    assert ask(runs("idle"), runs("busy"), waits(3), idle=7000).events == []
    assert ask(runs("idle"), waits(2), idle=7000).events[0].kind == "attempt_started"


def test_no_more_stop_than_are_needed_the_longest_idle_first() -> None:
    assert stops(ask(runs("first"), runs("second"), waits(2), first=2000, second=3000)) == ["second"]
    assert stops(ask(runs("first"), runs("second"), waits(4), first=2000, second=3000)) == ["second", "first"]


def test_an_elastic_job_continues_on_its_fewest_ranks_where_that_is_enough() -> None:
    spec = make_spec(workers=ElasticWorkers(min=1, max=3))
    elastic = running(pending(spec, job_id="idle"), nodes=("a",) * 3, at=T0)
    (asked,) = ask(elastic, waits(3), idle=1800).events
    assert isinstance(asked, ev.StopRequested)
    assert (asked.purpose, asked.by) == (StopPurpose.RESIZE, ByShrinking(job="new", ranks=1, instead_of=3))
    assert stops(ask(elastic, waits(4), idle=1800)) == ["idle"]
    (whole,) = ask(elastic, waits(4), idle=1800).events
    assert isinstance(whole, ev.StopRequested)
    assert whole.purpose is StopPurpose.PREEMPT


def test_it_does_not_take_back_at_once_what_it_gave() -> None:
    idle = runs("idle", 4)
    (asked,) = ask(idle, waits(), idle=1800).events
    idle = after(idle, asked)
    idle = after(idle, gone(idle, at=NOW + 1), released(idle, at=NOW + 1))
    (back,) = [event for event in ask(idle, waits(), now=NOW + 1).events if event.job_id == "idle"]
    assert isinstance(back, ev.JobRequeued)
    assert back.not_before == NOW + 1 + 1800
    commands = ask(after(idle, back), waits(), now=NOW + 2)
    assert [event.job_id for event in commands.events] == ["new"]
    assert isinstance(commands.waiting["idle"], BackingOff)
    again = ask(after(idle, back), now=NOW + 1802)
    assert [event.job_id for event in again.events] == ["idle"]


def test_a_job_that_was_preempted_often_in_the_last_hour_is_left_alone() -> None:
    often = pending(make_spec(workers=2), job_id="idle")
    for at in (NOW - 3000, NOW - 2900, NOW - 2800, NOW - 2700):
        often = running(often, nodes=("a", "a"), at=at - 50)
        often = after(often, stop(often, StopPurpose.PREEMPT, at=at), gone(often, at=at), released(often, at=at))
        often = after(often, ev.JobRequeued(job_id=often.id, at=at, reason=MadeRoom(by=ByUser(name="ada"))))
    often = running(often, nodes=("a", "a"), at=NOW - 2600)
    commands = ask(often, runs("busy"), waits(), idle=2000)
    assert commands.events == []
    assert commands.wake_at == NOW + 600
