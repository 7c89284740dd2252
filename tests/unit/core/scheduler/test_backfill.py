"""Short jobs run on resources that the head of the queue has claimed, and end before it could start."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByIdleReclaim
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Failed, Succeeded
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.durations import Basis, Like, RunTimeHistory, RunTimes, TimeLeft
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.scheduler import Commands, State, decide
from orchestrator.core.scheduler.shares import Account, Amounts, PastUse, Sharing, Used, UseHistory
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.queues import QueueSpec
from tests.support.records import replace
from tests.unit.core.builders import T0, after, failure, make_spec, node, nodes, pending, running, stop, up

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 3600
HOUR = timedelta(hours=1)
NODES = nodes(node("a", gpus=8, cpus=64))


def waits(name: str, sequence: int, ranks: int | ElasticWorkers, **keys: Any) -> Job:
    return pending(make_spec(workers=ranks, **keys), sequence=sequence, job_id=name)


def runs(name: str, ranks: int, *, at: float = T0, **keys: Any) -> Job:
    return running(waits(name, 1, ranks, **keys), nodes=("a",) * ranks, at=at)


def ask(*jobs: Job, now: float = NOW, run_times: RunTimes | None = None, sharing: Sharing | None = None) -> Commands:
    past = PastUse(run_times=run_times or RunTimes())
    state = State(jobs={job.id: job for job in jobs}, nodes=NODES, past=past, sharing=sharing or Sharing())
    return decide(state, now)


def starts(commands: Commands) -> list[str]:
    return [event.job_id for event in commands.events if isinstance(event, ev.AttemptStarted)]


LONG_WAIT = Sharing(ageing=180.0)
"""With these terms, a job that waits since T0 claims the free resources from all others."""
HEAD = waits("head", 2, 8, max_duration=timedelta(seconds=1))


def test_a_job_that_ends_before_the_head_can_start_takes_what_it_has_claimed() -> None:
    busy = runs(
        "busy", 6, max_duration=3 * HOUR
    )  # it is expected to run for an hour more, and ends after two hours at the latest
    assert starts(ask(busy, HEAD, waits("short", 3, 2, max_duration=HOUR))) == ["short"]
    assert starts(ask(busy, HEAD, waits("long", 3, 2, max_duration=HOUR + timedelta(seconds=1)))) == []
    assert starts(ask(busy, HEAD, waits("unknown", 3, 2))) == [], "only a limit is sure"
    assert starts(ask(busy, HEAD, waits("large", 3, 3, max_duration=HOUR))) == []


def test_the_loop_is_woken_when_a_job_that_has_run_for_longer_is_expected_to_run_for_longer() -> None:
    job = waits("short", 3, 2, max_duration=HOUR)
    commands = ask(runs("busy", 6), HEAD, job, now=NOW - 603, sharing=LONG_WAIT)
    assert (starts(commands), commands.wake_at) == ([], NOW)
    assert starts(ask(runs("busy", 6), HEAD, job, now=NOW, sharing=LONG_WAIT)) == ["short"]
    sure = ask(runs("busy", 6, max_duration=HOUR + timedelta(minutes=10)), HEAD, job)
    assert sure.wake_at == T0 + 4200, "when the job ends, not before"


def test_equals_pass_a_head_of_which_nobody_knows_when_it_starts_and_others_do_not() -> None:
    """Resources that are kept for the head stay idle until jobs end that may run for ever."""
    busy, last = runs("busy", 6), waits("unimportant", 4, 1, priority=40)
    assert starts(ask(busy, HEAD, waits("equal", 3, 1), last)) == ["equal"], "what is left is kept from the unimportant"
    assert starts(ask(busy, HEAD, waits("equal", 3, 2), last)) == ["equal"]
    assert starts(ask(busy, HEAD, last)) == []
    elsewhere = waits("elsewhere", 3, 1, queue="nightly")
    assert starts(ask(busy, HEAD, elsewhere)) == ["elsewhere"], "without queues of the settings all jobs are in one"
    nightly = waits("nightly", 2, 8, queue="nightly")
    queues = Sharing(queues=(QueueSpec(name="nightly"),))
    assert starts(ask(busy, nightly, waits("behind", 3, 1), sharing=queues)) == []
    assert starts(ask(busy, HEAD, waits("equal", 3, 2), sharing=LONG_WAIT)) == [], "once it has waited for long"


def test_as_long_as_other_users_may_come_first_a_head_claims_nothing_from_them_until_it_is_very_late() -> None:
    jobs = {
        job.id: job
        for job in (runs("busy", 6), HEAD, pending(make_spec(workers=2), sequence=3, job_id="b", user="bob"))
    }

    def asked(ageing: float, started: float) -> list[str]:
        lanes = ("default", HEAD.submission.user, HEAD.priority), ("default", "bob", HEAD.priority)
        used = {Account("default", "bob"): Used(NOW, Amounts(gpus=1e9))}
        past = PastUse(used=used, started=dict(zip(lanes, (started, NOW - 5), strict=True)))
        return starts(decide(State(jobs=jobs, nodes=NODES, past=past, sharing=Sharing(ageing=ageing)), NOW))

    assert asked(1800.0, NOW - 10) == ["b"]
    assert asked(1800.0, NOW - 1800) == ["b"], "its lane is overdue: it comes before all others, and is passed"
    assert asked(360.0, NOW - 10) == [], "ten times the time after which it has aged"


def test_equals_pass_no_head_for_which_others_stop() -> None:
    idle = runs("idle", 6)
    by = ByIdleReclaim(job=HEAD.id, seconds=60.0)
    leaving = after(
        idle, ev.StopRequested(job_id=idle.id, at=NOW, purpose=StopPurpose.PREEMPT, by=by, deadline=NOW + 30)
    )
    assert starts(ask(leaving, HEAD, waits("equal", 3, 2))) == []


def test_no_elastic_job_grows_into_what_a_head_waits_for() -> None:
    small = waits("elastic", 3, ElasticWorkers(min=1, max=2))
    (start,) = ask(runs("busy", 6), HEAD, small).events
    assert isinstance(start, ev.AttemptStarted)
    assert start.nodes == ("a",)


def test_jobs_that_end_at_their_limit_or_are_stopping_set_the_time_of_the_reservation() -> None:
    limited = runs("limited", 6, max_duration=timedelta(hours=1, minutes=10))
    brief = waits("brief", 3, 2, max_duration=timedelta(minutes=10))
    assert starts(ask(limited, HEAD, brief)) == ["brief"]
    assert starts(ask(limited, HEAD, brief, now=NOW + 1)) == []
    stopping = after(runs("busy", 6), stop(runs("busy", 6), StopPurpose.CANCEL))
    assert starts(ask(stopping, HEAD, brief, sharing=LONG_WAIT)) == [], "its ranks are gone within seconds"


def test_nothing_is_backfilled_where_jobs_can_be_stopped_for_the_head() -> None:
    urgent = waits("urgent", 2, 8, priority=60)
    commands = ask(runs("busy", 6), urgent, waits("short", 3, 2, max_duration=HOUR))
    assert [event.job_id for event in commands.events] == ["busy"], "it stops, and then the urgent job has room"
    kept = runs("kept", 6, min_runtime=timedelta(minutes=90))
    half_an_hour = waits("short", 3, 2, max_duration=timedelta(minutes=30))
    assert starts(ask(kept, urgent, half_an_hour)) == ["short"], "until its min_runtime is over"
    assert starts(ask(kept, urgent, waits("longer", 3, 2, max_duration=timedelta(minutes=31)))) == []


def test_a_head_that_would_wait_for_a_job_of_which_nothing_is_known_reserves_no_time() -> None:
    fresh = runs("fresh", 6, at=NOW)
    short = waits("short", 3, 2, max_duration=timedelta(seconds=1))
    assert starts(ask(fresh, HEAD, short, sharing=LONG_WAIT)) == []
    later = ask(fresh, HEAD, short, now=NOW + 1, sharing=LONG_WAIT)
    assert starts(later) == ["short"]


def test_the_head_starts_no_later_than_its_reservation_whatever_is_backfilled() -> None:
    """The queue is never empty of short jobs; the head starts when the busy job ends at its limit."""
    jobs = LiveJobs([runs("busy", 6, max_duration=2 * HOUR), HEAD])
    now, number, ends = NOW, 10, {JobId("busy"): T0 + 7200}
    began: float | None = None
    backfilled = 0
    while began is None and now <= T0 + 9000:
        for _ in range(3):
            number += 1
            jobs[JobId(f"short-{number}")] = waits(f"short-{number}", number, 1, max_duration=timedelta(minutes=7))
        for job_id in [i for i, at in ends.items() if at <= now]:
            del jobs[job_id], ends[job_id]
        for event in decide(State(jobs=jobs, nodes=NODES), now).events:
            if isinstance(event, ev.StopRequested):
                continue
            job = fold(jobs[event.job_id], event)
            jobs[job.id] = fold(job, up(job, at=now, attempt=job.attempt_number))
            ends[job.id] = now + 420
            began = now if job.id == HEAD.id else began
            backfilled += began is None
        now += 60
    assert began == T0 + 7200
    assert backfilled > 10


# -- known durations


def ended(name: str, seconds: float, at: float = NOW, state: JobState = JobState.SUCCEEDED) -> Job:
    job = running(pending(make_spec(workers=1), job_id=name), nodes=("a",), at=at - seconds)
    phase = Succeeded() if state is JobState.SUCCEEDED else Failed(failure=failure(), exit_code=1)
    return replace(job, phase=phase, state_since=at, attempts=(replace(job.attempts[-1], ended_at=at),))


def test_run_times_of_like_jobs_say_what_is_left() -> None:
    history = RunTimeHistory()
    for n, seconds in enumerate([100, 200, 300, 900]):
        history.ended(ended(f"job-{n}", seconds))
    history.ended(ended("failed", 5, state=JobState.FAILED))
    assert history.view.known == {Like("ada", "digits"): (100, 200, 300, 900)}
    fresh = waits("fresh", 9, 1)
    assert history.view.left(fresh, NOW) == TimeLeft(250, Basis.HISTORY, 4)
    going = runs("going", 1, at=NOW - 250)
    assert history.view.left(going, NOW) == TimeLeft(600 - 250, Basis.HISTORY, 4), "of those that ran longer"
    assert history.view.left(runs("old", 1, at=NOW - 1000), NOW) == TimeLeft(1000, Basis.ELAPSED)
    short = waits("short", 9, 1, max_duration=timedelta(seconds=60))
    assert history.view.left(short, NOW) == TimeLeft(60, Basis.LIMIT)
    assert RunTimes().left(fresh, NOW) is None


def test_how_wrong_the_forecasts_were() -> None:
    key = Like("ada", "digits")
    assert RunTimes({key: (100, 100, 100)}).error(waits("job", 1, 1)) is None
    assert RunTimes({key: (100, 100, 100, 200, 100)}).error(waits("job", 1, 1)) == pytest.approx(0.25)


def test_a_restarted_daemon_knows_the_newest_run_times_in_their_order() -> None:
    jobs = [ended(f"job-{n}", 10 + n, at=NOW + n) for n in range(30)]
    watched, read = UseHistory(60.0), UseHistory(60.0)
    for job in jobs:
        watched.observe(job, ev.JobFinished(job_id=job.id, at=NOW, state=JobState.SUCCEEDED, reason=job.reason))
    read.remember(reversed(jobs[15:]))
    read.remember(reversed(jobs[:15]))
    expected = {Like("ada", "digits"): tuple(float(10 + n) for n in range(10, 30))}
    assert watched.view().run_times.known == read.view().run_times.known == expected
