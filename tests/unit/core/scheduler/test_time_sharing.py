"""Time sharing: jobs that have run for long stop, just after a save, for jobs that are expected to need less."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsRoom, ByTimeSharing
from orchestrator.core.scheduler.durations import Like, RunTimes
from orchestrator.core.scheduler.live_jobs import MAX_IN_A_WINDOW
from orchestrator.core.scheduler.preemption import LATE_SECONDS
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.scheduler.shares import Account, Amounts, PastUse, Sharing, Used
from tests.unit.core.builders import T0, after, checkpoint, gone, make_spec, node, nodes, pending, released, running
from tests.unit.core.scheduler.test_levels import preempted

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 7200
NODES = nodes(node("a", gpus=8, cpus=64))


def runs(
    job_id: str, ranks: int, *, saved: float | None = NOW - 20, at: float = T0, user: str = "ada", **keys: Any
) -> Job:
    job = pending(make_spec(workers=ranks, **keys), sequence=1, job_id=job_id, user=user)
    job = running(job, nodes=("a",) * ranks, at=at)
    return job if saved is None else after(job, checkpoint(job, 5, path="/c/5", at=saved))


def waits(job_id: str, ranks: int = 4, *, sequence: int = 9, user: str = "ada", **keys: Any) -> Job:
    return pending(make_spec(workers=ranks, **keys), sequence=sequence, job_id=job_id, user=user, at=NOW - 60)


def ask(*jobs: Job, now: float = NOW, past: PastUse | None = None, **keys: Any) -> Commands:
    sharing = Sharing(**keys)
    return decide(State(jobs={job.id: job for job in jobs}, nodes=NODES, sharing=sharing, past=past or PastUse()), now)


def stopped(*jobs: Job, **keys: Any) -> list[str]:
    return [event.job_id for event in ask(*jobs, **keys).events if isinstance(event, ev.StopRequested)]


def test_a_job_that_has_run_for_long_stops_for_a_new_one_and_both_say_so() -> None:
    long, new = runs("long", 8), waits("new")
    commands = ask(long, new)
    (event,) = commands.events
    assert isinstance(event, ev.StopRequested)
    assert (event.job_id, event.by) == ("long", ByTimeSharing(job="new"))
    assert commands.waiting["new"] == AwaitsRoom(jobs=("long",))
    assert after(long, event).reason.sentence() == (
        "making room for new, which is expected to need less time; its processes have time to save"
    )


@pytest.mark.parametrize(
    ("long", "new"),
    [
        (runs("long", 8, saved=NOW - 100), waits("new")),
        (runs("long", 8, saved=None), waits("new")),
        (runs("long", 8, at=NOW - 1900, saved=NOW - 5), waits("new")),
        (runs("long", 8, preemptible=False), waits("new")),
        (runs("long", 8, priority=60), waits("new")),
        (runs("long", 8), preempted(waits("new"), 20_000)),
        (runs("long", 8, user="bob"), waits("new")),
        (runs("long", 2), waits("new", 7, gpu=1.0, nodes=("b",))),
    ],
    ids=[
        "unsaved",
        "never saved",
        "new itself",
        "not preemptible",
        "higher priority",
        "ran for longer",
        "other user",
        "no use",
    ],
)
def test_it_runs_on(long: Job, new: Job) -> None:
    used = {Account("default", "ada"): Used(NOW, Amounts(gpus=1e9))}
    assert stopped(long, new, past=PastUse(used=used)) == []


def test_a_job_of_a_user_with_a_larger_share_gives_way() -> None:
    assert stopped(runs("long", 8, user="bob"), waits("new")) == ["long"]


def test_no_more_stop_than_are_needed_and_those_that_lose_least() -> None:
    jobs = [runs(f"long-{n}", 2, saved=NOW - 10 * n) for n in range(1, 5)]
    assert stopped(*jobs, waits("new", 2)) == ["long-1"]
    assert sorted(stopped(*jobs, waits("new", 3))) == ["long-1", "long-2"]
    large = runs("large", 6, saved=NOW - 1)
    assert stopped(runs("small", 2, saved=NOW - 2), large, waits("new", 6)) == ["large"]


def saves(job_id: str, ranks: int, *, every: float, ago: float) -> Job:
    """Return a job that saves regularly, the last time ``ago`` seconds ago."""
    job = runs(job_id, ranks, saved=NOW - ago - every)
    return after(job, checkpoint(job, 6, path="/c/6", at=NOW - ago))


def test_jobs_stop_one_after_the_other_each_when_it_has_saved_and_what_they_leave_is_kept() -> None:
    now, soon = saves("now", 4, every=600, ago=20), saves("soon", 4, every=600, ago=500)
    new, small = waits("new", 8), waits("small", 1, sequence=10)
    commands = ask(now, soon, new, small)
    (event,) = commands.events
    assert event.job_id == "now"
    now = after(now, event)
    now = after(now, gone(now, at=NOW), released(now, at=NOW))
    now = after(now, ev.JobRequeued(job_id=now.id, at=NOW, reason=now.reason))
    commands = ask(now, soon, new, small)
    assert commands.events == [], "neither an equal that came later nor the job that stopped starts in its place"
    assert commands.wake_at == NOW + 100 + LATE_SECONDS
    soon = after(soon, checkpoint(soon, 7, path="/c/7", at=NOW + 95))
    assert [e.job_id for e in ask(now, soon, new, small, now=NOW + 96).events] == ["soon"]


def test_none_stops_for_a_job_for_which_not_enough_are_due_to_save() -> None:
    now = saves("now", 4, every=600, ago=20)
    for other in (
        saves("late", 4, every=7200, ago=100),
        saves("over", 4, every=100, ago=200),
        runs("x", 4, saved=None),
    ):
        assert stopped(now, other, waits("new", 8)) == []
        assert stopped(now, other, waits("new", 8), waits("next", 4, sequence=10)) == ["now"], "but for the next one"


def test_jobs_that_were_preempted_often_are_left_alone() -> None:
    job = pending(make_spec(workers=8), sequence=1, job_id="long")
    for number in range(MAX_IN_A_WINDOW):
        job = preempted(job, 2000, at=NOW - 400 + number)
    job = running(job, nodes=("a",) * 8, at=NOW - 50)
    job = after(job, checkpoint(job, 9, path="/c/9", at=NOW - 5))
    assert stopped(job, waits("new")) == []


def test_what_becomes_free_is_kept_for_the_job_that_others_stop_for_and_for_none_else() -> None:
    long, other, new = runs("long", 4), runs("other", 4, preemptible=False), waits("new", 4)
    (event,) = ask(long, other, new).events
    long = after(long, event)
    assert ask(long, other, new, waits("small", 1, sequence=10)).events == []
    long = after(long, gone(long), released(long))
    events = ask(long, other, new, waits("small", 1, sequence=10), now=NOW + 5).events
    assert [e.job_id for e in events if isinstance(e, ev.AttemptStarted)] == ["new"]
    free = [runs("kept", 6, preemptible=False), waits("large", 4), waits("small", 1, sequence=10)]
    assert [e.job_id for e in ask(*free).events] == ["small"], "a job for which none can stop claims nothing"
    assert [e.job_id for e in ask(*free, ageing=6.0).events] == [], "unless it has waited too long"


def test_a_job_that_has_waited_too_long_is_served_whatever_the_shares_and_levels() -> None:
    fresh = runs("fresh", 6, at=NOW - 30, saved=NOW - 5, user="bob")
    large, small = waits("large", 8, user="ada"), waits("small", 1, sequence=10, user="bob")
    past = PastUse(used={Account("default", "ada"): Used(NOW, Amounts(gpus=1e9))})
    assert stopped(fresh, large, past=past) == []
    (event,) = ask(fresh, large, past=past, ageing=6.0).events
    assert isinstance(event, ev.StopRequested)
    assert (event.job_id, event.by) == ("fresh", ByTimeSharing(job="large", overdue=True))
    assert after(fresh, event).reason.sentence().startswith("making room for large, which has waited for too long;")
    kept = runs("kept", 1, preemptible=False)
    assert ask(fresh, kept, large, small, past=past, ageing=6.0).events == [], "nor for another: it would be claimed"


def test_a_known_short_job_is_served_before_the_unknown_ones() -> None:
    times = RunTimes({Like("ada", "words"): (100, 100, 100)})
    long = runs("long", 8, at=NOW - 900, saved=NOW - 5)
    jobs = [long, waits("unknown", 8), waits("short", 8, sequence=10, name="words")]
    commands = ask(*jobs, past=PastUse(run_times=times))
    assert [(e.job_id, e.by) for e in commands.events if isinstance(e, ev.StopRequested)] == [
        ("long", ByTimeSharing(job="short"))
    ]
