"""The index of live jobs: after any changes, its decisions are those of a new index."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByLimit, NotEnoughFree
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.scheduler import State, decide, shares_of, waiting_order
from orchestrator.core.states import JobState, StopPurpose
from tests.support.records import replace
from tests.unit.core.builders import T0, gone, make_spec, node, nodes, pending, released, running, up
from tests.unit.core.scheduler.reference import random_case
from tests.unit.core.scheduler.reference_sharing import NOW

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.scheduler import Commands


def followed(job: Job, event: ev.Event, now: float) -> Job:
    """Return the record after an event, and after the runtime's immediate answer to a start."""
    job = fold(job, event)
    return fold(job, up(job, at=now, attempt=job.attempt_number)) if isinstance(event, ev.AttemptStarted) else job


def disturb(choose: random.Random, jobs: LiveJobs, now: float) -> None:
    """Stop a random job, let it end and release its gang, or forget it."""
    if not jobs:
        return
    job = jobs[choose.choice(list(jobs))]
    if job.state.is_terminal:
        del jobs[job.id]
    elif job.state is JobState.DRAINING:
        job = fold(job, gone(job, at=now)) if job.attempt_live else job
        jobs[job.id] = fold(job, released(job, at=now)) if job.gang_open else job
    else:
        purpose = choose.choice([StopPurpose.PREEMPT, StopPurpose.CANCEL, StopPurpose.PAUSE])
        for event in request_stop(job, purpose, ByLimit(key="test"), now):
            job = fold(job, event)
        jobs[job.id] = job


def outcome(commands: Commands) -> tuple[object, ...]:
    return sorted(map(repr, commands.events)), dict(commands.waiting), commands.wake_at


@pytest.mark.parametrize("seed", range(12))
def test_a_kept_index_decides_as_a_new_one(seed: int) -> None:
    choose = random.Random(seed)
    given, known, policy = random_case(seed)
    kept = LiveJobs(given)
    now = NOW
    for _ in range(12):
        state = State(jobs=kept, nodes=known, sharing=policy.sharing, past=policy.past)
        anew = replace(state, jobs=dict(kept))
        assert waiting_order(state, now) == waiting_order(anew, now)
        commands = decide(state, now)
        assert outcome(commands) == outcome(decide(anew, now))
        queue = given[0].spec.queue
        assert shares_of(state, now).held_gpus(queue) == shares_of(anew, now).held_gpus(queue)
        for event in commands.events:
            kept[event.job_id] = followed(kept[event.job_id], event, now)
        now += choose.choice([0, 1, 400])
        disturb(choose, kept, now)


def test_reasons_are_those_of_the_jobs_as_they_are_now() -> None:
    jobs = LiveJobs([pending(make_spec(workers=8), sequence=n, job_id=f"job-{n}") for n in range(1, 40)])
    commands = decide(State(jobs=jobs, nodes=nodes(node("a", gpus=8, cpus=64))), T0)
    [start] = commands.events
    jobs[start.job_id] = followed(jobs[start.job_id], start, T0)
    waiting = decide(State(jobs=jobs, nodes=nodes(node("a", gpus=8, cpus=64))), T0).waiting
    assert len(waiting) == 38
    assert isinstance(waiting[JobId("job-39")], NotEnoughFree)
    jobs[jobs[JobId("job-39")].id] = running(jobs[JobId("job-39")], nodes=("a",) * 8)
    assert waiting.get(JobId("job-39")) is None
    assert waiting.get(JobId("unknown")) is None
