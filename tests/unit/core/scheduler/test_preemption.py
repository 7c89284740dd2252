"""Jobs that stop for one of higher priority, and jobs that never do."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsRoom, ByPreemption, NotEnoughFree
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.live_jobs import MAX_IN_A_WINDOW, WINDOW_SECONDS, LiveJobs
from orchestrator.core.scheduler.placement import free_on, place
from orchestrator.core.scheduler.preemption import Preemption, PreemptionPlan
from orchestrator.core.scheduler.scheduler import Commands, State, decide, indexed, shares_of
from orchestrator.core.states import JobState, StopPurpose
from tests.unit.core.builders import T0, after, checkpoint, exited, gone, make_spec, node, nodes, pending, released
from tests.unit.core.builders import running as run

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

NOW = T0 + 1000
NODES = nodes(node("a", gpus=8))


def running(name: str, ranks: int, sequence: int = 1, **keys: Any) -> Job:
    """Return a job that has run on node a since T0 + 3, by default with the priority 50."""
    return run(pending(make_spec(workers=ranks, **keys), sequence=sequence, job_id=name), nodes=("a",) * ranks)


def head(ranks: int, priority: int = 60) -> Job:
    return pending(make_spec(workers=ranks, priority=priority), sequence=99, job_id="urgent")


def room_for(job: Job, *jobs: Job, now: float = NOW) -> PreemptionPlan:
    """Return the jobs that stop for one."""
    there = State(jobs=LiveJobs(jobs), nodes=NODES)
    return Preemption(
        indexed(there.jobs), free_on(NODES.values(), jobs), NODES, shares_of(there, now), RunTimes(), now
    ).room(job)


def ask(*jobs: Job, now: float = NOW) -> Commands:
    return decide(State(jobs={job.id: job for job in jobs}, nodes=NODES), now)


def stopped(*jobs: Job, now: float = NOW) -> list[str]:
    return [event.job_id for event in ask(*jobs, now=now).events if isinstance(event, ev.StopRequested)]


def test_a_job_stops_for_one_of_higher_priority_and_both_say_so() -> None:
    low, urgent = running("low", 8), head(4)
    commands = ask(low, urgent)
    (event,) = commands.events
    assert isinstance(event, ev.StopRequested)
    assert (event.job_id, event.purpose) == ("low", StopPurpose.PREEMPT)
    assert event.by == ByPreemption(job="urgent", priority=60)
    assert commands.waiting["urgent"] == AwaitsRoom(jobs=("low",))
    assert commands.waiting["urgent"].sentence() == "waiting until low has stopped to make room"
    low = after(low, event)
    assert low.reason.sentence() == "making room for urgent, priority 60; its processes have time to save"
    again = ask(low, urgent)
    assert again.events == [], "it is asked once"
    assert again.waiting["urgent"] == AwaitsRoom(jobs=("low",))
    ends = [exited(low, rank=rank, exit_code=0, at=NOW + 1, stop_seen_at=NOW + 0.5) for rank in range(8)]
    low = after(low, *ends, gone(low), released(low))
    (requeued,) = ask(low, urgent, now=NOW + 2).events[:1]
    low = after(low, requeued)
    assert (low.state, low.reason.sentence()) == (JobState.PENDING, "stopped to make room for urgent, priority 60")
    (first,) = ask(low, urgent, now=NOW + 2).events
    assert isinstance(first, ev.AttemptStarted)
    assert first.job_id == "urgent"


def test_no_job_stops_for_one_of_the_same_priority() -> None:
    commands = ask(running("low", 8), head(4, priority=50))
    assert commands.events == []
    assert isinstance(commands.waiting["urgent"], NotEnoughFree)


def test_a_job_that_may_not_be_preempted_runs_on() -> None:
    assert stopped(running("low", 8, preemptible=False), head(4)) == []


def test_a_job_is_left_alone_for_its_min_runtime() -> None:
    low = running("low", 8, min_runtime=timedelta(seconds=1500))
    commands = ask(low, head(4))
    assert (commands.events, commands.wake_at) == ([], T0 + 3 + 1500)
    assert stopped(low, head(4), now=T0 + 3 + 1500) == ["low"]


def test_the_job_that_loses_the_least_gpu_time_stops() -> None:
    early, late = running("early", 4, 1), running("late", 4, 2)
    assert stopped(early, late, head(4)) == ["late"], "of equal losses, the job that came last"
    early = fold(early, checkpoint(early, 7, path="/ckpt/7", at=NOW - 10))
    assert stopped(early, late, head(4)) == ["early"]


def test_no_more_jobs_stop_than_are_needed() -> None:
    small, large = running("small", 2, 1), running("large", 6, 2)
    assert stopped(small, large, head(2)) == ["small"]
    assert stopped(small, large, head(5)) == ["large"], "the small one would not be enough, and is not needed then"
    assert sorted(stopped(small, large, head(8))) == ["large", "small"]


def test_nothing_stops_where_it_would_not_be_enough() -> None:
    assert stopped(running("low", 2), running("kept", 6, preemptible=False), head(4)) == []


def test_nothing_stops_where_a_job_ends_anyway() -> None:
    low, ending = running("low", 4, 1), running("ending", 4, 2)
    stop = ev.StopRequested(
        job_id=ending.id, at=NOW, purpose=StopPurpose.CANCEL, by=ByPreemption(job="x", priority=1), deadline=NOW + 9
    )
    assert stopped(low, after(ending, stop), head(4)) == []


def test_nothing_stops_while_jobs_are_being_started() -> None:
    low, small = running("low", 6), pending(make_spec(workers=2, priority=70), sequence=2, job_id="small")
    commands = ask(low, small, head(4))
    assert [type(event) for event in commands.events] == [ev.AttemptStarted], "the next round weighs what is left"


def test_a_job_is_not_preempted_again_and_again() -> None:
    low = _preempted(running("low", 8), MAX_IN_A_WINDOW)
    room = room_for(head(4), low)
    assert room.stop == ()
    assert room.ask_again_at is not None
    assert room.ask_again_at > NOW
    assert [job.id for job in room_for(head(4), low, now=room.ask_again_at).stop] == ["low"]
    assert room.ask_again_at <= NOW + WINDOW_SECONDS


def _preempted(job: Job, times: int) -> Job:
    """Return the job after it was preempted ``times`` times in the last minutes and started again."""
    by = ByPreemption(job="other", priority=60)
    at = NOW - 10.0 * times
    for _ in range(times):
        job = after(
            job,
            ev.StopRequested(job_id=job.id, at=at, purpose=StopPurpose.PREEMPT, by=by, deadline=at + 30),
        )
        job = after(job, *(exited(job, rank=r, signal=15, at=at + 1, stop_seen_at=at) for r in range(job.num_workers)))
        job = after(job, gone(job), released(job))
        job = after(job, *decide(State(jobs={job.id: job}, nodes={}), at + 2).events)
        assert job.state is JobState.PENDING
        job = run(job, nodes=("a",) * job.num_workers, at=at + 3)
        at += 10.0
    return job


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(30, 70), st.booleans()), max_size=6),
    wanted=st.integers(1, 8),
)
def test_what_stops_is_enough_and_none_of_it_is_too_much(sizes: list[tuple[int, int, bool]], wanted: int) -> None:
    jobs: list[Job] = []
    for number, (ranks, priority, may) in enumerate(sizes):
        if sum(job.num_workers for job in jobs) + ranks <= 8:
            jobs.append(running(f"job-{number}", ranks, number, priority=priority, preemptible=may))
    urgent = head(wanted)
    room = room_for(urgent, *jobs)
    gone_ids = {job.id for job in room.stop}

    def fits(without: set[str]) -> bool:
        left = free_on(NODES.values(), [job for job in jobs if job.id not in without])
        return place(urgent, left, NODES) is not None

    assert all(job.priority < urgent.priority and job.spec.preemptible for job in room.stop)
    if room.stop:
        assert fits(gone_ids)
        assert not any(fits(gone_ids - {one}) for one in gone_ids)
    else:
        allowed = {job.id for job in jobs if job.priority < urgent.priority and job.spec.preemptible}
        assert fits(set()) or not fits(allowed)
