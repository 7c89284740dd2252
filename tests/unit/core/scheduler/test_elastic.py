"""Elastic jobs: their number of ranks at the start and after a loss, and the stops that let them grow."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByGrowth
from orchestrator.core.ids import JobId
from orchestrator.core.job.record import Job
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.scheduler.elastic import FRESH_SECONDS
from orchestrator.core.scheduler.placement import capacity, claim, could_ever_fit, free_on, place
from orchestrator.core.scheduler.scheduler import Commands, State, decide, queue_order
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.core.stored import job_from_dict, job_to_dict
from orchestrator.spec.model import AutoWorkers, ElasticWorkers, WorkerAdvice
from tests.support.records import replace
from tests.unit.core.builders import (
    T0,
    after,
    changed,
    checkpoint,
    exited,
    gone,
    lost,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    stop,
)

if TYPE_CHECKING:
    from orchestrator.core.cluster import Node

GROW = 300.0
LATER = T0 + 3 + GROW
TWO_TO_EIGHT = ElasticWorkers(min=2, max=8)


def elastic_job(name: str = "elastic", sequence: int = 1, workers: Any = TWO_TO_EIGHT, **keys: Any) -> Job:
    return pending(make_spec(workers=workers, **keys), sequence=sequence, job_id=name)


def on(ranks: int, *, saved_at: float = LATER, **keys: Any) -> Job:
    """Return an elastic job that has run on ``ranks`` GPUs of node a since T0 + 3, and has just saved a checkpoint."""
    job = running(elastic_job(**keys), nodes=("a",) * ranks)
    return fold(job, checkpoint(job, 7, path="/ckpt/7", at=saved_at))


def ask(*jobs: Job, now: float = LATER, known: tuple[Node, ...] = (node("a"),)) -> Commands:
    return decide(State(jobs={j.id: j for j in jobs}, nodes=nodes(*known)), now)


def starts(commands: Commands) -> dict[str, int]:
    return {e.job_id: len(e.nodes) for e in commands.events if isinstance(e, ev.AttemptStarted)}


class TestTheStart:
    @pytest.mark.parametrize(("gpus", "ranks"), [(2, 2), (5, 5), (8, 8), (12, 8)])
    def test_it_takes_what_is_free_up_to_its_most(self, gpus: int, ranks: int) -> None:
        assert starts(ask(elastic_job(), known=(node("a", gpus=gpus),))) == {"elastic": ranks}

    def test_it_waits_for_its_fewest(self) -> None:
        commands = ask(elastic_job(), on(7, name="other", sequence=2, saved_at=LATER - FRESH_SECONDS - 1))
        assert not commands.events
        assert commands.waiting["elastic"].sentence().startswith("waiting for 2 GPUs")

    def test_who_waits_behind_it_is_served_before_it_gets_more_than_it_needs(self) -> None:
        fixed = pending(make_spec(workers=4), sequence=2, job_id="fixed")
        assert starts(ask(elastic_job(), fixed)) == {"elastic": 4, "fixed": 4}

    def test_two_of_them_share_by_order(self) -> None:
        second = elastic_job("second", 2, ElasticWorkers(min=1, max=8))
        assert starts(ask(elastic_job(), second)) == {"elastic": 7, "second": 1}

    def test_the_strictest_strategies_bound_it(self) -> None:
        known = (node("a", gpus=3), node("b", gpus=5))
        assert starts(ask(elastic_job(strategy="STRICT_PACK"), known=known)) == {"elastic": 5}
        assert starts(ask(elastic_job(strategy="STRICT_SPREAD"), known=known)) == {"elastic": 2}

    def test_auto_takes_what_is_free_and_keeps_that_number(self) -> None:
        job = elastic_job(workers="auto")
        (event,) = ask(job, known=(node("a", gpus=3),)).events
        job = fold(job, event)
        assert (job.num_workers, job.size.least, job.size.most, job.elastic is not None) == (3, 3, 3, False)

    @pytest.mark.parametrize(("ranks", "started"), [(4, 4), (1, 2), (40, 6)])
    def test_auto_starts_as_advised_within_its_limits_and_keeps_that_number(self, ranks: int, started: int) -> None:
        job = elastic_job(workers="auto", auto=AutoWorkers(min=2, max=6, advice=WorkerAdvice(ranks=ranks)))
        assert starts(ask(job)) == {"elastic": started}
        (event,) = ask(job).events
        job = fold(job, event)
        assert (job.num_workers, job.size.least, job.size.most) == (started, started, started)
        assert job_from_dict(job_to_dict(job)) == job

    def test_advised_auto_waits_for_its_number_and_without_advice_takes_what_is_free_within_its_limits(self) -> None:
        two = (node("a", gpus=2),)
        advised = AutoWorkers(max=8, advice=WorkerAdvice(ranks=4))
        assert starts(ask(elastic_job(workers="auto", auto=advised), known=two)) == {}
        assert starts(ask(elastic_job(workers="auto", auto=AutoWorkers(max=3)))) == {"elastic": 3}
        assert starts(ask(elastic_job(workers="auto", auto=AutoWorkers(min=3)), known=two)) == {}

    def test_the_size_belongs_to_the_attempt_and_survives_the_store(self) -> None:
        job = on(5)
        job = after(job, stop(job, StopPurpose.PAUSE), gone(job), released(job))
        assert (job.nodes, job.num_workers, job.attempts[-1].ranks) == ((), 5, 5)
        assert job_from_dict(job_to_dict(job)) == job


class TestALoss:
    def lose_node(self, job: Job, *, not_before: float = 0.0) -> Job:
        job = fold(job, lost(job, at=LATER, not_before=not_before))
        (failed,) = ask(job).events
        job = fold(job, failed)
        assert job.state is JobState.RECOVERING
        return after(job, gone(job), released(job))

    def spread(self) -> Job:
        return running(elastic_job(), nodes=("a",) * 4 + ("b",) * 3)

    def test_it_goes_on_with_fewer_at_once(self) -> None:
        job = self.lose_node(self.spread())
        (event,) = ask(job, known=(node("a", gpus=4), node("b", alive=False))).events
        assert isinstance(event, ev.AttemptStarted)
        after_it = fold(job, event)
        assert (after_it.state, after_it.num_workers, after_it.attempt_number) == (JobState.STARTING, 4, 2)
        assert after_it.restarts == {"infra": 1}

    def test_below_its_fewest_it_waits_in_the_queue(self) -> None:
        job = self.lose_node(self.spread())
        (event,) = ask(job, known=(node("a", gpus=1),)).events
        assert isinstance(event, ev.JobRequeued)
        assert fold(job, event).state is JobState.PENDING

    def test_it_keeps_its_place_but_jumps_no_queue(self) -> None:
        urgent = pending(make_spec(workers=3, priority=90), sequence=9, job_id="urgent")
        job = self.lose_node(self.spread())
        commands = ask(job, urgent, known=(node("a", gpus=4),))
        assert starts(commands) == {"urgent": 3}
        assert [e.job_id for e in commands.events if isinstance(e, ev.JobRequeued)] == ["elastic"]

    def test_ranks_that_were_cut_off_are_waited_for(self) -> None:
        (event,) = ask(self.lose_node(self.spread(), not_before=LATER + 20)).events
        assert isinstance(event, ev.JobRequeued)
        assert event.not_before == LATER + 20

    def test_a_rank_that_only_died_changes_no_number(self) -> None:
        job = running(elastic_job(), nodes=("a",) * 4)
        job = fold(job, exited(job, 1, signal=9))
        (failed,) = ask(job).events
        job = after(fold(job, failed), gone(job))
        (event,) = ask(job).events
        assert isinstance(event, ev.AttemptStarted)
        assert (len(event.nodes), event.gang) == (4, job.gang)


class TestGrowing:
    def test_it_is_stopped_at_a_checkpoint_and_starts_on_more(self) -> None:
        job = on(3)
        (event,) = ask(job).events
        assert isinstance(event, ev.StopRequested)
        assert (event.purpose, event.by) == (StopPurpose.RESIZE, ByGrowth(ranks=8, instead_of=3))
        job = fold(job, event)
        assert job.state is JobState.DRAINING
        assert not ask(job).events
        job = after(job, gone(job), released(job))
        (start,) = ask(job).events
        job = fold(job, start)
        assert (job.state, job.num_workers, job.restarts, job.no_progress) == (JobState.STARTING, 8, {}, 0)

    def test_not_before_it_ran_for_its_time_and_it_says_when_to_ask(self) -> None:
        commands = ask(on(3, saved_at=LATER - 10), now=LATER - 10)
        assert not commands.events
        assert commands.wake_at == LATER

    def test_the_job_sets_its_time(self) -> None:
        job = on(3, workers=replace(TWO_TO_EIGHT, grow_after=timedelta(seconds=20)), saved_at=T0 + 25)
        assert ask(job, now=T0 + 25).events

    def test_only_when_this_attempt_has_saved_one(self) -> None:
        job = running(elastic_job(), nodes=("a",) * 3)
        assert not ask(job).events

    @pytest.mark.parametrize("waiting", [5, 8])
    def test_never_into_what_somebody_waits_for(self, waiting: int) -> None:
        waits = pending(make_spec(workers=waiting), sequence=2, job_id="waits")
        commands = ask(on(3), waits)
        assert [type(e) for e in commands.events] == ([ev.AttemptStarted] if waiting == 5 else [])

    def test_not_on_a_node_where_nothing_new_may_start(self) -> None:
        assert not ask(on(3), known=(node("a", cordoned=True), node("b"))).events

    @pytest.mark.parametrize("trouble", [{"degraded": True}, {"gang_lost": True}])
    def test_not_while_it_is_in_trouble(self, trouble: dict[str, bool]) -> None:
        commands = ask(changed(on(3), **trouble))
        assert not any(isinstance(e, ev.StopRequested) for e in commands.events)

    def test_at_its_most_it_stays(self) -> None:
        assert not ask(on(8)).events

    def test_one_gpu_is_given_to_one_of_two(self) -> None:
        commands = ask(on(3), on(4, name="second", sequence=2))
        assert [e.job_id for e in commands.events] == ["elastic"]

    def test_what_it_had_is_its_own_while_it_is_stopped(self) -> None:
        job = on(6)
        job = fold(job, ask(job).events[0])
        job = after(job, gone(job), released(job))
        urgent = pending(make_spec(workers=3, priority=100), sequence=9, job_id="urgent")
        assert starts(ask(job, urgent)) == {"elastic": 6}

    def test_when_that_is_gone_it_takes_what_there_is(self) -> None:
        job = on(6)
        job = fold(job, ask(job).events[0])
        job = after(job, gone(job), released(job))
        assert starts(ask(job, known=(node("a", gpus=4),))) == {"elastic": 4}

    def test_a_cancel_overrides_it(self) -> None:
        job = on(3)
        job = fold(job, ask(job).events[0])
        job = after(job, stop(job, StopPurpose.CANCEL), gone(job), released(job))
        (event,) = ask(job).events
        assert isinstance(event, ev.JobFinished)

    def test_one_that_ended_by_itself_before_has_succeeded(self) -> None:
        job = on(2)
        asked = ask(job).events[0]
        ends = [exited(job, rank=r, exit_code=0, at=LATER - 1) for r in range(2)]
        job = after(job, asked, *ends, gone(job), released(job))
        (succeeded,) = ask(job).events
        (event,) = ask(after(job, succeeded)).events
        assert isinstance(event, ev.JobFinished)
        assert event.state is JobState.SUCCEEDED


# -- random clusters and queues

sizes = st.one_of(
    st.integers(1, 6),
    st.just("auto"),
    st.tuples(st.integers(1, 4), st.integers(0, 5)).map(lambda p: ElasticWorkers(min=p[0], max=p[0] + p[1])),
)
strategies = st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
clusters = st.lists(st.integers(0, 6), min_size=1, max_size=3).map(
    lambda gpus: tuple(node(name, gpus=g) for name, g in zip("abc", gpus, strict=False))
)
queues = st.lists(st.tuples(sizes, strategies, st.sampled_from([40, 50, 60]), st.sampled_from([0.5, 1, 2])), max_size=5)


def queue_of(drawn: list[tuple[Any, str, int, float]]) -> list[Job]:
    return [
        elastic_job(f"job-{n}", n, size, strategy=strategy, priority=priority, gpu=gpu)
        for n, (size, strategy, priority, gpu) in enumerate(drawn, start=1)
    ]


def settled(jobs: dict[JobId, Job], known: tuple[Node, ...], now: float) -> tuple[dict[JobId, Job], list[ev.Event]]:
    """Fold decisions until none follows; return the jobs and all events."""
    told: list[ev.Event] = []
    for _ in range(20):
        commands = decide(State(jobs=jobs, nodes=nodes(*known)), now)
        if not commands.events:
            return jobs, told
        for event in commands.events:
            jobs = {**jobs, event.job_id: fold(jobs[event.job_id], event)}
            told.append(event)
    raise AssertionError(f"decisions do not settle: {[e.kind for e in told]}")


def check_books(jobs: dict[JobId, Job], known: tuple[Node, ...]) -> None:
    held: Counter[str] = Counter()
    for job in jobs.values():
        if job.gang_open:
            assert job.size.least <= len(job.nodes) <= job.size.most
            assert len(job.nodes) == job.num_workers == job.attempts[-1].ranks
            for node_id in job.nodes:
                held[node_id] += job.spec.resources.resources_per_worker.gpu  # type: ignore[assignment]
    assert all(held[n.id] <= n.gpus + 1e-9 for n in known)


@given(drawn=queues, known=clusters)
@settings(max_examples=100, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_everybody_is_placed_within_his_bounds_and_who_waits_could_not_start(
    drawn: list[tuple[Any, str, int, float]], known: tuple[Node, ...]
) -> None:
    jobs, _ = settled({j.id: j for j in queue_of(drawn)}, known, T0)
    check_books(jobs, known)
    # With every elastic job at its minimum, no further job of the queue would start; some may not start, because smaller
    # gangs leave other nodes free.
    least = [elastic_job(str(j.id), j.submission.sequence, j.size.least, **_keys(j)) for j in queue_of(drawn)]
    frugal, _ = settled({j.id: j for j in least}, known, T0)
    assert {i for i, j in jobs.items() if j.gang_open} >= {i for i, j in frugal.items() if j.gang_open}


def _keys(job: Job) -> dict[str, Any]:
    resources = job.spec.resources
    return {
        "strategy": resources.placement_strategy,
        "priority": job.priority,
        "gpu": resources.resources_per_worker.gpu,
    }


@given(size=sizes, strategy=strategies, known=clusters)
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_capacity_is_the_most_that_can_be_placed(size: Any, strategy: str, known: tuple[Node, ...]) -> None:
    job = elastic_job(workers=size, strategy=strategy)
    free = free_on(known, ())
    most = capacity(job, free, nodes(*known))
    for ranks in range(1, most + 3):
        found = place(job, free, nodes(*known), ranks=ranks)
        assert (found is not None and len(found) == ranks) == (ranks <= most)


@given(drawn=queues, known=clusters, ends=st.lists(st.integers(0, 9), max_size=4), data=st.data())
@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_growing_takes_nothing_from_who_waits_and_does_not_flap(
    drawn: list[tuple[Any, str, int, float]], known: tuple[Node, ...], ends: list[int], data: st.DataObject
) -> None:
    """Jobs end one by one while elastic ones save all the time; time passes in steps of less than ``grow_after``."""
    now = T0
    jobs: dict[JobId, Job] = {j.id: j for j in queue_of(drawn)}
    stopped_at: dict[JobId, float] = {}
    for turn in range(12):
        waiting = [j for j in jobs.values() if j.state is JobState.PENDING]
        jobs, told = settled(jobs, known, now)
        check_books(jobs, known)
        for event in told:
            if isinstance(event, ev.StopRequested):
                assert event.purpose is StopPurpose.RESIZE
                assert now - stopped_at.get(event.job_id, float("-inf")) >= GROW
                stopped_at[event.job_id] = now
        # Jobs that wait now have claimed the free resources: a growing job's stop left the claims alone.
        still = [j for j in waiting if jobs[j.id].state is JobState.PENDING and could_ever_fit(j, nodes(*known))]
        free = free_on(known, jobs.values())
        for job in sorted(still, key=queue_order):
            assert place(job, free, nodes(*known)) is None
            claim(job, free, nodes(*known))
        jobs = {i: _one_turn(j, now) for i, j in jobs.items()}
        running_now = sorted(i for i, j in jobs.items() if j.state is JobState.RUNNING)
        if turn < len(ends) and running_now:
            ended = running_now[ends[turn] % len(running_now)]
            job = jobs.pop(ended)
            assert job.num_workers == len(job.seats or job.nodes)
        now += data.draw(st.sampled_from([10.0, 100.0, 200.0]))


def _one_turn(job: Job, now: float) -> Job:
    """Do what the runtime does before the next decision: start, save, or stop and release."""
    if job.state is JobState.STARTING:
        pids = tuple(range(1, job.num_workers + 1))
        job = fold(job, ev.AttemptRunning(job_id=job.id, at=now, attempt=job.attempt_number, pids=pids))
    if job.state is JobState.RUNNING:
        return fold(job, checkpoint(job, int(now - T0) + 1, path=f"/ckpt/{now}", at=now + 100))
    if job.state is JobState.DRAINING:
        return after(job, gone(job, at=now), released(job, at=now))
    return job
