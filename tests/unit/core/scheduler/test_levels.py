"""The order of jobs with equal shares and priorities: the time that they are expected to need, then arrival."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByUser, MadeRoom
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import KEPT_ATTEMPTS
from orchestrator.core.scheduler.durations import Like, RunTimes, attained, ran_seconds
from orchestrator.core.scheduler.order import Rule
from orchestrator.core.scheduler.outlook import outlook_of
from orchestrator.core.scheduler.scheduler import State, waiting_order
from orchestrator.core.scheduler.shares import PastUse, Sharing
from orchestrator.core.states import JobState, StopPurpose
from tests.unit.core.builders import (
    T0,
    after,
    failed,
    gone,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    stop,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.job.record import Job

NOW = T0 + 7200
NODES = nodes(node("a", gpus=8, cpus=64))


def waits(job: str, sequence: int, *, at: float = NOW - 60, **keys: Any) -> Job:
    return pending(make_spec(workers=1, **keys), sequence=sequence, job_id=f"job-{job}", at=at)


def preempted(job: Job, seconds: float, *, at: float = NOW - 30) -> Job:
    """Return the job after it ran for ``seconds`` and was preempted."""
    job = running(job, at=at - seconds)
    job = after(job, stop(job, StopPurpose.PREEMPT, at=at), gone(job, at=at), released(job, at=at))
    return after(job, ev.JobRequeued(job_id=job.id, at=at, reason=MadeRoom(by=ByUser(name="ada"))))


def state(*jobs: Job, times: Mapping[str, Sequence[float]] | None = None, ageing: float = 86400.0) -> State:
    run_times = RunTimes({Like("ada", name): found for name, found in (times or {}).items()})
    sharing = Sharing(ageing=ageing)
    return State(jobs={job.id: job for job in jobs}, nodes=NODES, past=PastUse(run_times=run_times), sharing=sharing)


def order(*jobs: Job, now: float = NOW, **keys: Any) -> list[str]:
    return [job.id.removeprefix("job-") for job in waiting_order(state(*jobs, **keys), now)]


def test_jobs_of_which_nothing_is_known_go_by_arrival() -> None:
    assert order(waits("b", 2), waits("a", 1), waits("c", 3)) == ["a", "b", "c"]


def test_what_like_jobs_took_decides_and_the_unknown_count_for_ten_minutes() -> None:
    times = {"short": (50, 50, 50), "long": (9000, 9000, 9000), "rare": (1, 1)}
    jobs = [waits(name, n, name=name) for n, name in enumerate(("long", "rare", "new", "short"), start=1)]
    assert order(*jobs, times=times) == ["short", "rare", "new", "long"]
    found = outlook_of(JobId("job-rare"), state(*jobs, times=times), NOW)
    assert (found.ahead, found.rule) == (("job-short",), Rule.WORK)


def test_a_limit_puts_a_job_forward_and_never_back() -> None:
    brief = waits("brief", 2, max_duration=timedelta(minutes=5))
    generous = waits("generous", 1, max_duration=timedelta(days=9))
    assert order(generous, brief, waits("none", 3)) == ["brief", "generous", "none"]
    times = {"words": (9000, 9000, 9000)}
    assert order(waits("none", 1), waits("sure", 2, name="words", max_duration=timedelta(minutes=1)), times=times) == [
        "sure",
        "none",
    ]


def test_attained_service_counts_where_nothing_else_is_known() -> None:
    jobs = [preempted(waits("hours", 1), 5000), preempted(waits("minutes", 2), 400), waits("new", 3)]
    assert order(*jobs) == ["new", "minutes", "hours"], "of one level the one that has waited the longest goes first"
    times = {"digits": (5060, 5060, 5060)}
    assert order(*jobs, times=times)[0] == "hours", "it is nearly done, as far as is known"


def test_a_failure_costs_no_place() -> None:
    job = running(waits("fell", 1), at=T0 + 10)
    job = after(job, failed(job, keep_gang=False, at=NOW - 60, failed_at=NOW - 60), gone(job), released(job))
    job = after(job, ev.JobRequeued(job_id=job.id, at=NOW - 50, reason=job.reason))
    assert (job.state, attained(job)) == (JobState.PENDING, 0.0)
    assert order(job, waits("new", 2)) == ["fell", "new"]


def test_a_job_that_waited_too_long_goes_first_and_a_preempted_one_waits_anew() -> None:
    old, brief = waits("old", 1, at=T0), waits("brief", 2, max_duration=timedelta(minutes=1))
    again = preempted(waits("again", 3, at=T0), 5000)
    times = {"digits": (9000, 9000, 9000)}
    assert order(old, brief, again, times=times) == ["brief", "again", "old"]
    assert order(old, brief, again, times=times, ageing=3600.0) == ["old", "brief", "again"]
    assert order(old, brief, again, times=times, ageing=3600.0, now=NOW + 3600) == ["old", "brief", "again"]
    found = outlook_of(brief.id, state(old, brief, again, times=times, ageing=3600.0), NOW)
    assert (found.ahead, found.rule) == (("job-old",), Rule.AGED)


def test_the_longest_waiting_preempted_job_comes_before_those_that_were_submitted_since() -> None:
    back = [preempted(waits(f"back-{n}", n, at=T0), 60.0 * 4**n, at=NOW - 4000 + n) for n in range(1, 5)]
    fresh = [waits(f"new-{n}", 10 + n, at=NOW - 3990 + n) for n in range(3)]
    wanted = ["back-1", "back-2", "back-3", "back-4", "new-0", "new-1", "new-2"]
    assert order(*back, *fresh, ageing=3600.0) == wanted
    assert order(*fresh, *back, ageing=3600.0, now=NOW - 400) == [
        "back-1",
        "back-2",
        "new-0",
        "new-1",
        "new-2",
        "back-3",
        "back-4",
    ]


def test_service_counts_that_the_record_no_longer_lists() -> None:
    job = waits("often", 1, at=T0)
    for number in range(KEPT_ATTEMPTS + 5):
        job = preempted(job, 100, at=T0 + 200.0 * (number + 1))
    assert len(job.attempts) == KEPT_ATTEMPTS
    assert ran_seconds(job, NOW) == 100 * (KEPT_ATTEMPTS + 5)
