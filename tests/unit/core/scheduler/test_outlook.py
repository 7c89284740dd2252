"""Expected starts of jobs, found by playing the decisions forward."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.durations import Basis, Like, RunTimes
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.order import Rule
from orchestrator.core.scheduler.outlook import Outlook, expected_starts, front_of, outlook_of
from orchestrator.core.scheduler.preemption import REPEATED_SECONDS
from orchestrator.core.scheduler.scheduler import State, decide, waiting_order
from orchestrator.core.scheduler.shares import PastUse, Sharing
from orchestrator.spec.queues import parse_queues
from tests.unit.core.builders import T0, checkpoint, make_spec, node, nodes, pending, running
from tests.unit.core.scheduler.reference import random_case
from tests.unit.core.scheduler.reference_sharing import NOW as THEN
from tests.unit.core.scheduler.test_live_jobs import followed

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 3600
NODES = nodes(node("a", gpus=8, cpus=64))
HOUR = timedelta(hours=1)


def waits(name: str, sequence: int, ranks: int, **keys: Any) -> Job:
    user = keys.pop("user", "ada")
    return pending(make_spec(workers=ranks, **keys), sequence=sequence, job_id=name, user=user)


def runs(name: str, ranks: int, *, at: float = T0, **keys: Any) -> Job:
    return running(waits(name, 1, ranks, **keys), nodes=("a",) * ranks, at=at)


def state(*jobs: Job, run_times: RunTimes | None = None, queues: str = "") -> State:
    past = PastUse(run_times=run_times or RunTimes())
    sharing = Sharing(queues=parse_queues(queues))
    return State(jobs={job.id: job for job in jobs}, nodes=NODES, past=past, sharing=sharing)


def outlook(name: str, *jobs: Job, **keys: Any) -> Outlook:
    return outlook_of(JobId(name), state(*jobs, **keys), NOW)


def test_a_job_starts_when_those_end_that_have_what_it_needs() -> None:
    long, short = runs("long", 4, max_duration=3 * HOUR, user="bob"), runs("short", 4, max_duration=1.5 * HOUR)
    first, second = waits("first", 5, 4, max_duration=HOUR), waits("second", 6, 4)
    found = outlook("first", long, short, first, second)
    assert (found.starts_at, found.ahead, found.rule) == (T0 + 5400, (), None)
    [holder] = found.holders
    assert (holder.job.id, holder.ends_at) == ("short", T0 + 5400)
    assert holder.left is not None
    assert holder.left.basis is Basis.LIMIT
    later = outlook("second", long, short, first, second)
    assert (later.starts_at, later.ahead, later.rule) == (T0 + 7200, ("first",), Rule.ARRIVAL), (
        "long runs as long again"
    )
    assert [one.job.id for one in later.holders] == ["short", "long"]
    assert expected_starts(state(long, short, first, second), NOW, 9) == {"first": T0 + 5400, "second": T0 + 7200}


def test_run_times_of_like_jobs_say_when_and_how_wrong_they_were() -> None:
    busy, job = runs("busy", 8, at=NOW - 500), waits("job", 5, 8)
    times = RunTimes({Like("ada", "digits"): (1000.0, 1000.0, 1000.0, 2000.0)})
    found = outlook("job", busy, job, run_times=times)
    assert found.starts_at == NOW + 500
    assert [(one.left.basis, one.left.jobs, one.error) for one in found.holders if one.left] == [
        (Basis.HISTORY, 4, 0.5)
    ]
    told = RunTimes(reported={busy.id: 77.0})
    assert outlook("job", busy, job, run_times=told).starts_at == NOW + 77


def test_what_nothing_is_known_of_gives_no_estimate_and_is_named() -> None:
    busy = runs("busy", 8, at=NOW, user="bob")
    found = outlook("job", busy, waits("job", 5, 8))
    assert found.starts_at is None
    assert [(one.job.submission.user, one.ends_at, one.left) for one in found.holders] == [("bob", None, None)]
    behind = outlook("behind", runs("busy", 8), waits("job", 5, 8), waits("behind", 6, 8))
    assert behind.starts_at is None, "the job before it may run for any time"


def test_what_a_preemption_would_stop_and_cost() -> None:
    low = fold(runs("low", 8), checkpoint(runs("low", 8), 9, path="/c", at=NOW - 90))
    found = outlook("urgent", low, waits("urgent", 5, 4, priority=60))
    assert [(one.job.id, one.gpu_seconds) for one in found.stops] == [("low", 8 * 90)]
    assert found.starts_at == NOW, "and it is stopped at once"
    equal = outlook("equal", low, waits("equal", 5, 4))
    assert [(one.job.id, one.gpu_seconds) for one in equal.stops] == [("low", 8 * REPEATED_SECONDS)], (
        "just after a save"
    )
    assert outlook("equal", low, waits("equal", 5, 4, priority=40)).stops == ()


@pytest.mark.parametrize(
    ("first", "second", "queues", "rule"),
    [
        ({"priority": 60}, {}, "", Rule.PRIORITY),
        ({}, {}, "", Rule.ARRIVAL),
        ({"user": "bob"}, {}, "", Rule.USER),
        ({"queue": "prod"}, {"queue": "lab"}, "prod guaranteed=8; lab", Rule.QUEUE),
    ],
)
def test_the_rule_that_decides_is_named(first: dict[str, Any], second: dict[str, Any], queues: str, rule: Rule) -> None:
    busy = runs("busy", 8, queue=second.get("queue", "default"))
    jobs = (busy, waits("first", 5, 8, **first), waits("second", 6, 8, **second))
    found = outlook("second", *jobs, queues=queues)
    assert (found.ahead, found.rule) == (("first",), rule)


@pytest.mark.parametrize("seed", range(12))
def test_an_outlook_changes_nothing_and_agrees_with_the_decisions(seed: int) -> None:
    given, known, policy = random_case(seed)
    jobs = LiveJobs(given)
    before = dict(jobs)
    there = State(jobs=dict(before), nodes=known, sharing=policy.sharing, past=policy.past)
    expected = expected_starts(there, THEN, 99)
    front, order = front_of(there, THEN)
    assert list(order) == [job.id for job in waiting_order(there, THEN)]
    assert expected_starts(front, THEN, 99) == expected, "what does not wait for room alone changes nothing"
    assert there.jobs == before
    for event in decide(State(jobs=jobs, nodes=known, sharing=policy.sharing, past=policy.past), THEN).events:
        jobs[event.job_id] = followed(jobs[event.job_id], event, THEN)
    begun = {i for i, job in jobs.items() if job.gang_open and not before[i].gang_open}
    assert begun <= {i for i, at in expected.items() if at == THEN}
