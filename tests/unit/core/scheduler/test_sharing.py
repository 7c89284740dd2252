"""Shares of queues and users, quotas, limits, ageing and reclaims in whole decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import AwaitsRoom, QueueAtMaximum, UserAtLimit
from orchestrator.core.lifecycle.advance import advance
from orchestrator.core.scheduler.preemption import Reclaim
from orchestrator.core.scheduler.scheduler import Commands, State, decide, shares_of
from orchestrator.core.scheduler.shares import (
    Account,
    Amounts,
    PastUse,
    Sharing,
    Used,
    UseHistory,
    fair_shares,
)
from orchestrator.core.simulation import Simulation, TraceJob
from orchestrator.core.states import StopPurpose
from orchestrator.spec.model import ElasticWorkers
from orchestrator.spec.queues import parse_queues
from tests.unit.core.builders import (
    T0,
    after,
    exited,
    gone,
    make_spec,
    node,
    nodes,
    pending,
    released,
    running,
    started,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.job.record import Job

NOW = T0 + 1000
NODES = nodes(node("a", gpus=8, cpus=64))
DAY = 86400.0


def waits(name: str, sequence: int, ranks: int = 1, user: str = "ada", **keys: Any) -> Job:
    return pending(make_spec(workers=ranks, **keys), sequence=sequence, job_id=name, user=user)


def runs(name: str, ranks: int, user: str = "ada", **keys: Any) -> Job:
    return running(waits(name, 1, ranks, user, **keys), nodes=("a",) * ranks)


def ask(*jobs: Job, queues: str = "", past: PastUse | None = None, now: float = NOW, **terms: Any) -> Commands:
    return decide(state(*jobs, queues=queues, past=past, **terms), now)


def state(*jobs: Job, queues: str = "", past: PastUse | None = None, **terms: Any) -> State:
    sharing = Sharing(queues=parse_queues(queues), **terms)
    return State(jobs={job.id: job for job in jobs}, nodes=NODES, sharing=sharing, past=past or PastUse())


def starts(commands: Commands) -> list[str]:
    return [event.job_id for event in commands.events if isinstance(event, ev.AttemptStarted)]


def test_free_gpus_are_shared_between_users_and_not_by_arrival_alone() -> None:
    jobs = [waits(f"ada-{n}", n) for n in range(1, 20)] + [waits(f"bob-{n}", 20 + n, user="bob") for n in range(4)]
    found = starts(ask(*jobs))
    assert [name.split("-")[0] for name in found] == ["ada", "bob"] * 4
    assert found[::2] == ["ada-1", "ada-2", "ada-3", "ada-4"], "each user's in order of arrival"


def test_a_user_that_used_much_goes_after_one_that_used_little_until_that_is_forgotten() -> None:
    past = PastUse(used={Account("default", "ada"): Used(NOW, Amounts(gpus=1e6))})
    jobs = [waits("ada", 1, 8), waits("bob", 2, 8, user="bob")]
    assert starts(ask(*jobs, past=past)) == ["bob"]
    assert starts(ask(*jobs, past=past, now=NOW + 60 * 7 * DAY, ageing=1e9)) == ["ada"]


def test_a_higher_priority_goes_before_a_smaller_share() -> None:
    past = PastUse(used={Account("default", "ada"): Used(NOW, Amounts(gpus=1e6))})
    jobs = [waits("ada", 1, 8, priority=60), waits("bob", 2, 8, user="bob")]
    assert starts(ask(*jobs, past=past)) == ["ada"]


def test_the_dominant_resource_counts() -> None:
    """Ada holds few GPUs and most of the CPUs; Bob the other way round, but less of his dominant resource."""
    held = [runs("ada-runs", 1, cpu=48), runs("bob-runs", 4, user="bob", cpu=1)]
    jobs = [waits("ada", 5, 3, priority=50), waits("bob", 6, 3, user="bob")]
    assert starts(ask(*held, *jobs)) == ["bob"]


def test_queues_share_by_weight() -> None:
    jobs = [waits(f"{q}-{n}", n + 100 * k, queue=q) for k, q in enumerate(("one", "three")) for n in range(1, 20)]
    found = starts(ask(*jobs, queues="one; three weight=3"))
    assert sum(name.startswith("three") for name in found) == 6


def test_a_guarantee_is_served_before_others_borrow() -> None:
    past = PastUse(used={Account("prod", "ada"): Used(NOW, Amounts(gpus=1e7))})
    jobs = [waits(f"research-{n}", n, queue="research") for n in range(1, 20)]
    jobs += [waits(f"prod-{n}", 100 + n, queue="prod") for n in range(20)]
    found = starts(ask(*jobs, queues="prod guaranteed=6; research", past=past))
    assert found[:6] == [f"prod-{n}" for n in range(6)]
    assert all(name.startswith("research") for name in found[6:]), "beyond it, what was used before counts"


def test_a_parent_keeps_its_share_whatever_its_queues() -> None:
    names = {"vision": "lab", "speech": "lab", "other": ""}
    jobs = [waits(f"{q}-{n}", n + 100 * k, queue=q) for k, q in enumerate(names) for n in range(1, 20)]
    found = starts(ask(*jobs, queues="lab; vision parent=lab; speech parent=lab; other"))
    assert sum(name.startswith("other") for name in found) == 4


def test_a_queue_at_its_maximum_waits_and_says_so_and_claims_nothing() -> None:
    held = runs("runs", 2, queue="research")
    jobs = [waits("more", 2, 2, queue="research"), waits("other", 3, 6, queue="prod")]
    commands = ask(held, *jobs, queues="research maximum=2; prod")
    assert starts(commands) == ["other"]
    reason = commands.waiting[jobs[0].id]
    assert reason == QueueAtMaximum(queue="research", maximum=2, used=2.0, gpus=2.0)
    assert reason.sentence() == "queue research is at its maximum of 2 GPUs"
    partly = ask(held, waits("more", 2, 2, queue="research"), queues="research maximum=3").waiting[jobs[0].id]
    assert partly.sentence() == "queue research holds 2 of its maximum of 3 GPUs, and the job needs 2"


def test_the_maximum_of_a_parent_holds_for_its_queues_together() -> None:
    jobs = [waits("vision", 1, 3, queue="vision"), waits("speech", 2, 3, queue="speech")]
    commands = ask(*jobs, queues="lab maximum=4; vision parent=lab; speech parent=lab")
    assert starts(commands) == ["vision"]
    assert commands.waiting[jobs[1].id] == QueueAtMaximum(queue="lab", maximum=4, used=3.0, gpus=3.0)


def test_a_job_without_gpus_starts_in_a_queue_at_its_maximum() -> None:
    commands = ask(
        runs("runs", 2, queue="research"), waits("cpu", 2, queue="research", gpu=0), queues="research maximum=2"
    )
    assert starts(commands) == ["cpu"]


def test_an_elastic_job_gets_no_more_ranks_than_its_queue_may_have() -> None:
    job = pending(make_spec(workers=ElasticWorkers(min=2, max=8), queue="research"), job_id="elastic")
    (event,) = ask(job, queues="research maximum=5").events
    assert isinstance(event, ev.AttemptStarted)
    assert len(event.nodes) == 5
    (event,) = ask(job, user_gpus=3).events
    assert isinstance(event, ev.AttemptStarted)
    assert len(event.nodes) == 3


def test_the_limits_of_a_user_hold_for_jobs_and_for_gpus() -> None:
    jobs = [waits("one", 1), waits("two", 2), waits("bob", 3, user="bob")]
    commands = ask(*jobs, user_jobs=1)
    assert starts(commands) == ["one", "bob"]
    assert commands.waiting[jobs[1].id] == UserAtLimit(user="ada", limit=1, used=1, gpus=0.0)
    assert commands.waiting[jobs[1].id].sentence() == "user ada has 1 job running, the limit of a user is 1"
    commands = ask(runs("runs", 3), waits("more", 2, 2), user_gpus=4)
    (reason,) = commands.waiting.values()
    assert reason.sentence() == "user ada holds 3 GPUs, the job needs 2, and the limit of a user is 4"


# -- reclaims


def test_a_queue_under_its_guarantee_takes_back_what_another_borrows() -> None:
    held = [runs(f"borrows-{n}", 2, queue="research") for n in range(4)]
    head = waits("prod", 9, 4, queue="prod", priority=10)
    commands = ask(*held, head, queues="prod guaranteed=4; research")
    stops = [event for event in commands.events if isinstance(event, ev.StopRequested)]
    assert len(stops) == 2
    assert {stop.purpose for stop in stops} == {StopPurpose.PREEMPT}
    assert isinstance(commands.waiting[head.id], AwaitsRoom)


def test_nothing_is_reclaimed_beyond_the_guarantee_nor_from_a_fair_share() -> None:
    held = [runs(f"borrows-{n}", 2, queue="research") for n in range(4)]
    assert ask(*held, waits("prod", 9, 4, queue="prod"), queues="prod guaranteed=2; research").events == []
    assert ask(*held, waits("prod", 9, 4, queue="prod", priority=90), queues="prod; research").events == []
    fair = [runs("fair", 4, queue="research"), runs("mine", 4, queue="prod")]
    assert ask(*fair, waits("more", 9, 2, queue="prod"), queues="prod guaranteed=4; research guaranteed=4").events == []


def test_where_more_is_guaranteed_than_there_is_a_reclaim_stops_at_the_fair_share() -> None:
    terms = "prod guaranteed=12; research guaranteed=4"  # of 8 GPUs: fair shares of 6 and 2
    held = [runs("mine", 4, queue="prod"), runs("theirs", 4, queue="research")]
    assert ask(*held, waits("more", 9, 4, queue="prod"), queues=terms).events == [], "and research would take it back"
    within = ask(*held, waits("more", 9, 2, queue="prod"), queues=terms)
    assert [event.job_id for event in within.events] == ["theirs"]


def test_a_job_that_is_not_preemptible_keeps_what_it_borrows() -> None:
    held = runs("borrows", 8, queue="research", preemptible=False)
    assert ask(held, waits("prod", 9, 4, queue="prod"), queues="prod guaranteed=4; research").events == []


def test_priorities_act_inside_a_queue_alone() -> None:
    held = runs("low", 8, queue="research", priority=10)
    assert ask(held, waits("high", 9, 4, queue="prod", priority=90), queues="prod; research").events == []
    inside = ask(held, waits("high", 9, 4, queue="research", priority=90), queues="prod; research")
    assert [event.job_id for event in inside.events] == ["low"]


SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=6)


@settings(deadline=None, max_examples=150)
@given(
    sizes=SIZES,
    wanted=st.integers(1, 8),
    guarantees=st.tuples(*[st.integers(0, 8)] * 3),
    weights=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_a_reclaim_never_lifts_a_queue_beyond_its_fair_share_above_a_sibling(
    sizes: list[tuple[str, int]], wanted: int, guarantees: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    table = "; ".join(
        f"{name} guaranteed={least} weight={weight}"
        for name, least, weight in zip("abc", guarantees, weights, strict=True)
    )
    held: list[Job] = []
    for number, (queue, ranks) in enumerate(sizes):
        if sum(job.num_workers for job in held) + ranks <= 8:
            held.append(runs(f"job-{number}", ranks, queue=queue))
    head = waits("head", 99, wanted, queue="a")
    given_state = state(*held, head, queues=table)
    stops = {event.job_id for event in decide(given_state, NOW).events if isinstance(event, ev.StopRequested)}
    if not stops:
        return
    shares = shares_of(given_state, NOW)
    fair = fair_shares(shares, {"a"})
    mine = shares.held_gpus("a") + wanted
    for queue in "bc":
        left = shares.held_gpus(queue) - sum(
            job.num_workers for job in held if job.id in stops and job.spec.queue == queue
        )
        saturation = left / fair[queue] if fair[queue] else float(left > 0)
        assert mine <= fair["a"] + 1e-6 or mine / fair["a"] <= saturation
        if left < shares.held_gpus(queue):
            assert shares.held_gpus(queue) > fair[queue], "only from what it borrows"


def test_fair_shares_divide_what_there_is_and_leave_nothing_to_waste() -> None:
    sharing = Sharing(queues=parse_queues("a guaranteed=2 maximum=3; b weight=3; c; idle guaranteed=2"))
    shares = shares_of(State(jobs={}, nodes=NODES, sharing=sharing), NOW)
    assert fair_shares(shares, {"a", "b", "c"}) == {"a": 3.0, "b": 3.75, "c": 1.25, "idle": 0.0}
    over = shares_of(state(queues="a guaranteed=8; b guaranteed=8"), NOW)
    assert fair_shares(over, {"a", "b"}) == {"a": 4.0, "b": 4.0}, "more is promised than there is"


def test_a_queue_that_is_not_configured_keeps_its_fair_share_too() -> None:
    sharing = Sharing(queues=parse_queues("prod guaranteed=4; research"))
    held = [runs("plain", 4), runs("other", 4, queue="research")]
    shares = shares_of(State(jobs={job.id: job for job in held}, nodes=NODES, sharing=sharing), NOW)
    assert fair_shares(shares, {"prod"}) == {"prod": 4.0 + 4 / 3, "default": 4 / 3, "research": 4 / 3}


def test_a_gang_without_gpus_neither_reclaims_nor_is_reclaimed() -> None:
    sharing = Sharing(queues=parse_queues("prod guaranteed=4; research"))
    held = runs("cpu", 2, queue="research", gpu=0)
    shares = shares_of(State(jobs={held.id: held}, nodes=NODES, sharing=sharing), NOW)
    assert not Reclaim(waits("prod", 2, queue="prod"), shares, ["prod"]).gives_way(held)
    assert not Reclaim(waits("cpu", 2, queue="prod", gpu=0), shares, ["prod"]).gives_way(runs("x", 8, queue="research"))


# -- ageing


def test_a_job_that_waited_too_long_goes_first_and_then_its_lane_waits_again() -> None:
    jobs = [waits("high", 2, 8, priority=90), waits("old", 1, 8, priority=10)]
    assert starts(ask(*jobs, ageing=2000)) == ["high"]
    assert starts(ask(*jobs, ageing=900)) == ["old"]
    just = PastUse(started={("default", "ada", 10): NOW - 10, ("default", "ada", 90): NOW - 10})
    assert starts(ask(*jobs, past=just, ageing=900)) == ["high"]


@settings(deadline=None, max_examples=6)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 4000),
            st.integers(1, 100),
            st.integers(1, 8),
            st.sampled_from("ab"),
            st.sampled_from((0, 50, 100)),
        ),
        min_size=5,
        max_size=60,
    )
)
def test_nothing_starves(arrivals: Sequence[tuple[int, int, int, str, int]]) -> None:
    """The bound of order.py holds for a stream of jobs of a queue that outweighs the others a thousandfold."""
    ageing, longest = 300.0, 100.0
    stream = [TraceJob(at=20.0 * n, seconds=100.0, ranks=4, user="urgent") for n in range(220)]
    others = [
        TraceJob(at=float(at), seconds=float(seconds), ranks=ranks, user=user, queue=f"q{number}")
        for at, seconds, ranks, user, number in arrivals
    ]
    trace = [*stream, *others]
    queues = parse_queues("default weight=1000; q0 weight=0.001; q50; q100")
    sharing = Sharing(queues=queues, ageing=ageing)
    outcome = Simulation(trace, nodes(node("a", gpus=8)), "orch", sharing=sharing).run()
    kinds = {(job.queue, job.user, job.priority) for job in trace}
    assert len(outcome.ran) == len(trace)
    for ran in outcome.ran:
        lane = (ran.job.queue, ran.job.user, ran.job.priority)
        ahead = sum((j.queue, j.user, j.priority) == lane and j.at <= ran.job.at and j is not ran.job for j in trace)
        assert ran.wait <= (ahead + 1) * (ageing + len(kinds) * longest)


# -- past usage


def test_the_history_counts_a_gang_from_its_order_to_its_end() -> None:
    history = UseHistory(half_life=1e12)
    job = waits("one", 1, 2)
    event = started(job, at=T0 + 10)
    job = after(job, event)
    assert history.observe(job, event), "when jobs of a lane last started"
    ended = [*(exited(job, rank=rank, signal=9, at=T0 + 90) for rank in range(2)), gone(job, at=T0 + 100)]
    job = after(job, *ended)
    freed = released(job, at=T0 + 110)
    for step in advance(job, T0 + 105).events:
        job = after(job, step)
        history.observe(job, step)
    job = after(job, freed)
    assert history.observe(job, freed)
    used = history.view().used[Account("default", "ada")]
    assert abs(used.amounts.gpus - 200.0) < 0.01
    assert history.view().started == {("default", "ada", 50): T0 + 10}


def test_the_history_is_rebuilt_from_records() -> None:
    history = UseHistory(half_life=1e12)
    held = runs("one", 2)
    history.remember([held])
    assert history.view().used == {}, "what is held is in the record"
    assert history.view().started == {("default", "ada", 50): held.attempts[0].started_at}
