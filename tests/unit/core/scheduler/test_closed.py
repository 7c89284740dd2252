"""Nodes that take no new jobs are named to the jobs that would have room there."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.faults import Closure, NodeClosed, RepeatedFailures
from orchestrator.core.facts.reasons import ByNodeDrain, NotEnoughFree, Queued
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.nodes.requests import node_state, node_view
from tests.unit.core.builders import T0, after, make_spec, node, nodes, pending, running

NOW = T0 + 100
BAD = RepeatedFailures(failures=3, job_id="x", cause=Queued())


def reason(*jobs: Any, known: Any, **keys: Any) -> NotEnoughFree:
    waiting = pending(make_spec(workers=4, **keys), job_id="waits", sequence=9)
    found = decide(State(jobs={j.id: j for j in (*jobs, waiting)}, nodes=known), NOW).waiting["waits"]
    assert isinstance(found, NotEnoughFree)
    return found


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"cordoned": True}, Closure.CORDONED),
        ({"alive": False}, Closure.DOWN),
        ({"reachable": False}, Closure.UNREACHABLE),
        ({"quarantined": BAD}, Closure.QUARANTINED),
    ],
)
def test_the_node_is_named_with_its_state(fields: dict[str, Any], state: Closure) -> None:
    holder = running(pending(make_spec(workers=4), job_id="runs"), nodes=("a",) * 4)
    found = reason(holder, known=nodes(node("a", gpus=4), node("b", gpus=4, **fields)))
    assert found.closed == (NodeClosed(node="b", state=state),)
    assert found.sentence().endswith(f"; node b is {state.value}")


def test_several_of_one_state_are_named_together_and_those_that_do_not_suit_are_not() -> None:
    holder = running(pending(make_spec(workers=4), job_id="runs"), nodes=("a",) * 4)
    shut = [node(name, gpus=4, cordoned=True) for name in "bc"]
    known = nodes(node("a", gpus=4), *shut, node("d", gpus=0, cordoned=True))
    assert reason(holder, known=known).sentence().endswith("; nodes b, c are cordoned")
    assert reason(holder, known=known, nodes=("a", "c")).closed == (NodeClosed(node="c", state=Closure.CORDONED),)


def test_a_node_drains_while_jobs_move_away_and_shows_what_they_use_and_then_nothing() -> None:
    job = running(pending(make_spec(workers=3), job_id="runs"), nodes=("b",) * 3)
    drained = ev.StopRequested(
        job_id=job.id, at=NOW, purpose=StopPurpose.PREEMPT, by=ByNodeDrain(name="ada"), deadline=NOW + 30
    )
    leaving, cordoned = after(job, drained), node("b", gpus=4, cordoned=True)
    assert reason(leaving, known=nodes(node("a", gpus=2), cordoned)).closed == (
        NodeClosed(node="b", state=Closure.DRAINING),
    )
    assert [node_state(cordoned, jobs) for jobs in ([leaving], [job], [])] == ["DRAINING", "CORDONED", "CORDONED"]
    shown = [node_view(cordoned, None, jobs) for jobs in ([leaving], [])]
    assert [(view.gpus_free, view.gpus_total) for view in shown] == [(1, 4), (4, 4)]
    assert node_view(node("b", gpus=4, alive=False), None, []).gpus_free == 0
