"""Reservations of nodes: jobs that start before one, jobs that stop when it begins, and the reasons of waiting jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.cluster import Node, NodeReservation
from orchestrator.core.facts.reasons import ByNodeReservation, NodeReserved, NotEnoughFree
from orchestrator.core.scheduler.durations import Like, RunTimes
from orchestrator.core.scheduler.outlook import outlook_of
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.scheduler.shares import PastUse
from orchestrator.core.states import JobState, StopPurpose
from tests.unit.core.builders import T0, after, gone, make_spec, node, nodes, pending, released, running

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.scheduler import Commands

HOUR = 3600.0
NOON = T0 + 2 * HOUR
WORK = NodeReservation(id="r1", start=NOON, end=NOON + HOUR, reason="new driver", by="ada")


def reserved(name: str, *reservations: NodeReservation, **fields: Any) -> Node:
    return node(name, gpus=2, reservations=reservations, **fields)


def lasting(hours: float | None, name: str = "digits", **fields: Any) -> Job:
    limit = None if hours is None else timedelta(hours=hours)
    return pending(make_spec(workers=1, name=name, max_duration=limit), **fields)


def decided(jobs: list[Job], *known: Node, now: float = T0, past: PastUse | None = None) -> Commands:
    return decide(State(jobs={job.id: job for job in jobs}, nodes=nodes(*known), past=past or PastUse()), now)


def starts(commands: Commands) -> dict[str, tuple[str, ...]]:
    return {e.job_id: e.nodes for e in commands.events if isinstance(e, ev.AttemptStarted)}


@pytest.mark.parametrize(
    ("hours", "now", "fits"),
    [
        (2.0, T0, True),  # ends when the reservation begins
        (2.1, T0, False),
        (None, T0, False),  # without a known end
        (0.5, NOON, False),  # the reservation has begun
        (None, NOON + HOUR, True),  # the reservation is over
    ],
)
def test_only_what_ends_in_time_starts_before(hours: float | None, now: float, fits: bool) -> None:
    job = lasting(hours)
    assert bool(starts(decided([job], reserved("a", WORK), now=now))) is fits
    assert starts(decided([job], reserved("a", WORK), reserved("b"), now=now))[job.id] == (("a",) if fits else ("b",))


def test_like_jobs_say_how_long_it_runs() -> None:
    job = lasting(None)
    past = PastUse(run_times=RunTimes({Like("ada", "digits"): [HOUR] * 3}))
    assert starts(decided([job], reserved("a", WORK), past=past)) == {job.id: ("a",)}
    longer = PastUse(run_times=RunTimes({Like("ada", "digits"): [3 * HOUR] * 3}))
    commands = decided([job], reserved("a", WORK), past=longer)
    (told,) = _reason(commands, job).reserved
    assert told == NodeReserved(node="a", start=NOON, end=NOON + HOUR, said="new driver", seconds=3 * HOUR)


def _reason(commands: Commands, job: Job) -> NotEnoughFree:
    reason = commands.waiting[job.id]
    assert isinstance(reason, NotEnoughFree)
    return reason


def test_a_job_that_waits_for_a_reservation_names_it_and_keeps_nothing_from_shorter_ones() -> None:
    long, short = lasting(3.0, job_id="long"), lasting(1.0, job_id="short", sequence=2)
    commands = decided([long, short], reserved("a", WORK), reserved("b", cordoned=True))
    assert starts(commands) == {"short": ("a",)}
    (told,) = _reason(commands, long).reserved
    assert (told.node, told.begun, told.seconds) == ("a", False, 3 * HOUR)
    assert commands.wake_at == NOON
    later = decided([long], reserved("a", WORK), now=NOON + 60)
    assert [fact.begun for fact in _reason(later, long).reserved] == [True]
    assert later.wake_at == NOON + HOUR
    assert starts(decided([long], reserved("a", WORK), now=NOON + HOUR)) == {"long": ("a",)}


def test_what_still_runs_when_it_begins_saves_and_goes_back_to_its_place() -> None:
    there = running(lasting(None, job_id="there"), nodes=("a",))
    elsewhere = running(lasting(None, job_id="elsewhere", sequence=2), nodes=("b",))
    known = (reserved("a", WORK), reserved("b"))
    assert decided([there, elsewhere], *known, now=NOON - 1).events == []
    (stop,) = decided([there, elsewhere], *known, now=NOON).events
    assert isinstance(stop, ev.StopRequested)
    by = ByNodeReservation(node="a", end=NOON + HOUR, said="new driver")
    assert (stop.job_id, stop.purpose, stop.by) == ("there", StopPurpose.PREEMPT, by)
    stopping = after(there, stop)
    assert decided([stopping, elsewhere], *known, now=NOON + 1).events == [], "it is asked once"
    ended = after(stopping, gone(stopping, at=NOON + 2), released(stopping, at=NOON + 2))
    (back,) = decided([ended, elsewhere], *known, now=NOON + 2).events
    ended = after(ended, back)
    assert (ended.state, ended.submission.sequence) == (JobState.PENDING, there.submission.sequence)
    commands = decided([ended, elsewhere], *known, now=NOON + 3)
    assert starts(commands) == {"there": ("b",)}


def test_a_job_that_needs_the_node_is_not_refused_and_is_expected_after_it() -> None:
    job = lasting(3.0)
    state = State(jobs={job.id: job}, nodes=nodes(reserved("a", WORK)))
    assert isinstance(decide(state, T0).waiting[job.id], NotEnoughFree)
    assert outlook_of(job.id, state, T0).starts_at == NOON + HOUR


def test_the_head_of_the_queue_is_backfilled_around_its_start_after_a_reservation() -> None:
    """The head needs both nodes, and one is reserved: jobs that end with the reservation run until then."""
    head = pending(make_spec(workers=4, max_duration=timedelta(hours=4)), job_id="head")
    fits, over = lasting(3.0, job_id="fits", sequence=2), lasting(3.1, job_id="over", sequence=3)
    commands = decided([head, fits, over], reserved("a", WORK), reserved("b"))
    assert starts(commands) == {"fits": ("b",)}


def test_preemption_makes_no_room_on_a_node_that_is_reserved_too_soon() -> None:
    low = running(pending(make_spec(workers=2, priority=10), job_id="low"), nodes=("a", "a"))
    urgent = pending(make_spec(workers=2, priority=90), job_id="urgent", sequence=2)
    assert decided([low, urgent], reserved("a", WORK)).events == []
    (stop,) = decided([low, urgent], reserved("a")).events
    assert stop.job_id == "low"
