"""Consolidation: jobs move to other nodes for a job that fits only then, where that costs less than it gains."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.moves import AwaitsMoves, ByConsolidation, MoveRefusal
from orchestrator.core.facts.reasons import NotEnoughFree
from orchestrator.core.facts.requesters import ByShrinking
from orchestrator.core.scheduler.outlook import outlook_of
from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.sentences import sentence
from orchestrator.core.states import AttemptState, JobState, StopPurpose
from orchestrator.spec.job import ElasticWorkers
from tests.unit.core.builders import (
    T0,
    after,
    checkpoint,
    gone,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    up,
)

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 7200
NODES = nodes(node("a", gpus=4), node("b", gpus=4))
ON = Sharing(consolidate=True)


def runs(job_id: str, at: str, ranks: int = 2, *, saved: float = 5.0, **keys: Any) -> Job:
    """Return a job that began long ago and saved ``saved`` seconds ago."""
    job = running(pending(make_spec(workers=ranks, **keys), job_id=job_id), nodes=(at,) * ranks, at=T0 + 2)
    return after(job, checkpoint(job, 5, path="/c", at=NOW - saved))


def waits(gpu: int = 4, **keys: Any) -> Job:
    spec = make_spec(**{"workers": 1, "gpu": gpu, **keys})
    return pending(spec, sequence=9, job_id="large", at=NOW - 3600)


def ask(*jobs: Job, now: float = NOW, sharing: Sharing = ON, known: Any = NODES) -> Commands:
    return decide(State(jobs={job.id: job for job in jobs}, nodes=known, sharing=sharing), now)


def moves(commands: Commands) -> dict[str, tuple[str, ...]]:
    found = [e for e in commands.events if isinstance(e, ev.StopRequested) and e.purpose is StopPurpose.MOVE]
    return {e.job_id: e.by.nodes for e in found if isinstance(e.by, ByConsolidation)}


def test_the_job_that_loses_the_least_moves_and_all_say_so() -> None:
    cheap, dear = runs("cheap", "a", saved=5), runs("dear", "b", saved=600)
    commands = ask(cheap, dear, waits())
    (asked,) = commands.events
    assert isinstance(asked, ev.StopRequested)
    lost, gained = 2 * (5 + 1), 4 * 7198  # the start took a second; the gain is for as long as both have run
    by = ByConsolidation(job="large", nodes=("b", "b"), names=("b",), lost_gpu_seconds=lost, gained_gpu_seconds=gained)
    assert (asked.job_id, asked.purpose, asked.by) == ("cheap", StopPurpose.MOVE, by)
    assert commands.waiting["large"] == AwaitsMoves(jobs=("cheap",))
    told = sentence(after(cheap, asked).reason)
    assert told.startswith("moving to node b to make room for large: it loses at most 0.0033 GPU hours")
    assert ask(after(cheap, asked), dear, waits()).events == [], "it is asked once"
    assert ask(after(cheap, asked), dear, waits()).waiting["large"] == AwaitsMoves(jobs=("cheap",))


def test_it_is_off_by_default() -> None:
    commands = ask(runs("cheap", "a"), runs("dear", "b"), waits(), sharing=Sharing())
    assert commands.events == []
    assert isinstance(commands.waiting["large"], NotEnoughFree)


@pytest.mark.parametrize(
    "keys",
    [
        {"preemptible": False},
        {"min_runtime": timedelta(hours=3)},
        {"priority": 60},
        {"saved": 7100.0, "ranks": 3},
    ],
)
def test_what_keeps_jobs_where_they_are(keys: dict[str, Any]) -> None:
    own = {"ranks": 2, **keys}
    assert moves(ask(runs("x", "a"), runs("y", "b"), waits()))
    commands = ask(runs("x", "a", **own), runs("y", "b", **own), waits())
    assert commands.events == []


def test_between_queues_priorities_do_not_count() -> None:
    from orchestrator.spec.queues import parse_queues

    sharing = Sharing(consolidate=True, queues=parse_queues("lab; prod"))
    urgent = {"priority": 60, "queue": "lab"}
    jobs = (runs("x", "a", **urgent), runs("y", "b", **urgent))
    assert not moves(ask(*jobs, waits(queue="lab"), sharing=sharing))
    assert moves(ask(*jobs, waits(queue="prod"), sharing=sharing)) == {"x": ("b", "b")}


def test_nothing_moves_where_it_would_cost_more_than_it_gains_and_it_is_weighed_again() -> None:
    soon = timedelta(seconds=7298)  # one ends in 100 s, so the large job gains 400 GPU seconds; each would lose 402
    jobs = (runs("x", "a", saved=200), runs("y", "b", saved=200, max_duration=soon), waits())
    commands = ask(*jobs)
    assert commands.events == []
    assert commands.wake_at == NOW + 10
    assert moves(ask(runs("x", "a", saved=190), *jobs[1:])) == {"x": ("b", "b")}


def test_a_save_that_is_due_is_waited_for() -> None:
    saving = runs("x", "a", saved=330)
    saving = after(saving, checkpoint(saving, 6, path="/d", at=NOW - 30))  # every 300 s: the next within 280
    soon = runs("x", "a", saved=340)
    soon = after(soon, checkpoint(soon, 6, path="/d", at=NOW - 40))
    assert moves(ask(saving, runs("y", "b", saved=900), waits())), "too far away to wait"
    soon = runs("x", "a", saved=120)
    soon = after(soon, checkpoint(soon, 6, path="/d", at=NOW - 60))  # every 60 s
    commands = ask(soon, runs("y", "b", saved=900), waits())
    assert commands.events == []
    assert commands.wake_at == NOW + 6
    assert moves(ask(soon, runs("y", "b", saved=900), waits(), now=NOW + 7)), "it is late"


def test_only_the_jobs_move_that_need_to_and_only_to_places_that_are_free_now() -> None:
    three = nodes(node("a", gpus=4), node("b", gpus=4), node("c", gpus=4))
    small = [runs("s1", "a", 1), runs("s2", "a", 1, saved=9), runs("s3", "b", 3), runs("s4", "c", 3)]
    assert moves(ask(*small, waits(), known=three)) == {"s1": ("b",), "s2": ("c",)}
    assert moves(ask(*small, waits(gpu=3), known=three)) == {"s1": ("b",)}
    none = [runs("s1", "a", 3), runs("s2", "b", 3), runs("s3", "c", 3)]
    assert ask(*none, waits(gpu=2), known=three).events == [], "no place for three ranks"


def test_a_cheap_job_stays_where_a_dearer_one_is_enough() -> None:
    three = nodes(node("a", gpus=4), node("b", gpus=4), node("c", gpus=4))
    cheap, dear = runs("cheap", "a", 1), runs("dear", "a", 2, saved=60)
    fixed = [runs("s3", "b", 3, preemptible=False), runs("s4", "c", 2, preemptible=False)]
    assert moves(ask(cheap, dear, *fixed, waits(gpu=3), known=three)) == {"dear": ("c", "c")}


def test_a_gang_for_one_node_gets_one() -> None:
    commands = ask(runs("x", "a"), runs("y", "b", saved=9), waits(gpu=1, workers=4, strategy="STRICT_PACK"))
    assert moves(commands) == {"x": ("b", "b")}


def test_an_elastic_job_shrinks_first() -> None:
    spec = make_spec(workers=ElasticWorkers(min=1, max=3))
    elastic = running(pending(spec, job_id="e"), nodes=("a",) * 3, at=T0 + 2)
    elastic = after(elastic, checkpoint(elastic, 5, path="/c", at=NOW - 5))
    (asked,) = ask(elastic, runs("y", "b"), waits(gpu=3)).events
    assert isinstance(asked, ev.StopRequested)
    assert asked.by == ByShrinking(job="large", ranks=2, instead_of=3)


class TestTheMove:
    """The move, from the stop to the start of both jobs."""

    def under_way(self) -> tuple[Job, Job, Job]:
        moved, other, large = runs("x", "a"), runs("y", "b", saved=900), waits()
        return after(moved, *ask(moved, other, large).events), other, large

    def test_its_place_is_kept_until_it_comes(self) -> None:
        moved, other, large = self.under_way()
        urgent = pending(make_spec(workers=2, priority=90), sequence=10, job_id="urgent", at=NOW)
        starts = [e for e in ask(moved, other, large, urgent).events if isinstance(e, ev.AttemptStarted)]
        assert [(e.job_id, e.nodes) for e in starts] == [("urgent", ("a", "a"))], "and not on b"

    def test_it_continues_there_at_once_and_the_large_one_starts_in_the_same_decision(self) -> None:
        moved, other, large = self.under_way()
        moved = after(moved, gone(moved, at=NOW + 1), released(moved, at=NOW + 1))
        assert moved.attempts[-1].state is AttemptState.PREEMPTED, "it counts for the bound of an hour"
        starts = ask(moved, other, large, now=NOW + 1).events
        assert [(e.job_id, e.nodes) for e in starts if isinstance(e, ev.AttemptStarted)] == [
            ("x", ("b", "b")),
            ("large", ("a",)),
        ]
        assert after(moved, starts[0]).state is JobState.STARTING

    def test_it_finds_another_place_when_its_own_is_gone(self) -> None:
        moved, other, large = self.under_way()
        moved = after(moved, gone(moved, at=NOW + 1), released(moved, at=NOW + 1))
        down = nodes(NODES["a"], node("b", gpus=4, cordoned=True))
        starts = ask(moved, other, large, now=NOW + 1, known=down).events
        assert [(e.job_id, e.nodes) for e in starts if isinstance(e, ev.AttemptStarted)] == [("x", ("a", "a"))]

    def test_it_does_not_move_again_before_it_has_saved(self) -> None:
        moved, other, large = self.under_way()
        moved = after(moved, gone(moved, at=NOW + 1), released(moved, at=NOW + 1))
        start = next(e for e in ask(moved, other, large, now=NOW + 1).events if e.job_id == "x")
        moved = after(moved, start)
        moved = after(moved, up(moved, at=NOW + 2, attempt=2))
        dear = runs("z", "a", saved=7000)
        state = (moved, dear, waits())
        only = nodes(node("a", gpus=4), node("b", gpus=4))
        assert "x" not in moves(ask(*state, now=NOW + 4000, known=only))
        moved = after(moved, checkpoint(moved, 9, path="/e", at=NOW + 3999))
        assert "x" in moves(ask(moved, dear, waits(), now=NOW + 4000, known=only))


def test_explain_has_what_would_move_or_why_nothing_does() -> None:
    def outlook(*jobs: Job, sharing: Sharing = ON) -> Any:
        return outlook_of(
            waits().id, State(jobs={j.id: j for j in jobs}, nodes=NODES, sharing=sharing), NOW
        ).consolidation

    jobs = (runs("x", "a"), runs("y", "b", saved=900), waits())
    found = outlook(*jobs)
    assert (found.jobs, found.places, found.refusal) == (("x",), (("b",),), None)
    assert sentence(found).startswith(
        "it fits with x to node b: they move, lose 0.0033 GPU hours at most, and it gains 8"
    )
    off = outlook(*jobs, sharing=Sharing())
    assert off.refusal is MoveRefusal.OFF
    assert "ORCH_CONSOLIDATE=yes" in sentence(off)
    fixed = outlook(runs("x", "a", preemptible=False), runs("y", "b", preemptible=False), waits())
    assert fixed.refusal is MoveRefusal.NO_PLACE
    assert "no jobs that may be moved" in sentence(fixed)
    short = timedelta(seconds=7201)
    dear = outlook(*(runs(i, i, saved=7000, max_duration=short) for i in "ab"), waits())
    assert dear.refusal is MoveRefusal.TOO_DEAR
    assert "they do not move" in sentence(dear)
    assert outlook(runs("x", "a", 3), runs("y", "b", 3), waits()) is None, "moves would be of no use"
