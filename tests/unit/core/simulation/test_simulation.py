"""A simulated queue: the production scheduler's decisions on a trace, and their figures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.simulation import POLICIES, Outcome, Ran, Simulation, Spread, TraceJob, figures_of
from tests.unit.core.builders import node, nodes

TWO_NODES = nodes(node("a", gpus=4, cpus=1e9), node("b", gpus=4, cpus=1e9))


def job(at: float, seconds: float, ranks: int = 1, **fields: float | str) -> TraceJob:
    return TraceJob(**{"at": at, "seconds": seconds, "ranks": ranks, **fields})  # type: ignore[arg-type]


def play(*trace: TraceJob, policy: str = "orch", checkpoint_seconds: float = 10.0) -> Outcome:
    return Simulation(trace, TWO_NODES, policy, checkpoint_seconds=checkpoint_seconds).run()


def times(outcome: Outcome) -> list[tuple[float, float, float]]:
    """Return submission, start and end of each job, in order of submission."""
    return sorted((one.job.at, one.started_at, one.ended_at) for one in outcome.ran)


def test_a_job_that_does_not_fit_waits_for_the_end_of_one_that_runs() -> None:
    outcome = play(job(0, 100, 8), job(1, 10, 8))
    assert times(outcome) == [(0, 0, 100), (1, 100, 110)]
    assert outcome.usage.busy == 8 * 110


def test_jobs_that_can_never_fit_are_counted_and_hold_nothing_up() -> None:
    outcome = play(job(0, 100, 9), job(1, 10))
    assert times(outcome) == [(1, 1, 11)]
    assert [one.ranks for one in outcome.refused] == [9]
    assert figures_of(outcome).refused == 1


def test_fifo_lets_nothing_overtake_and_the_daemon_does() -> None:
    trace = [job(0, 100, 5), job(1, 100, 8), job(2, 10, 3)]
    assert times(play(*trace, policy="fifo"))[2] == (2, 200, 210)
    assert times(play(*trace))[2] == (2, 2, 12)


def test_a_long_job_stops_for_a_new_one_when_it_has_saved_and_they_take_turns() -> None:
    outcome = play(job(0, 5000, 8), job(100, 5000, 8, user="b"), job(200, 60, 8, user="c"), checkpoint_seconds=600)
    assert [start for _, start, _ in times(outcome)] == [0, 2400, 4800]
    assert max(one.lost for one in outcome.ran) == 0
    assert max(one.preemptions for one in outcome.ran) > 1


def test_a_preempted_job_repeats_what_no_checkpoint_covers() -> None:
    outcome = play(job(0, 100, 8, priority=10), job(35, 20, 8, priority=90))
    assert times(outcome) == [(0, 0, 125), (35, 35, 55)]
    (preempted,) = (one for one in outcome.ran if one.preemptions)
    assert (preempted.preemptions, preempted.lost) == (1, 5 * 8)
    assert figures_of(outcome).lost_gpu_seconds == 40


def test_the_figures() -> None:
    figures = figures_of(play(job(0, 100, 8, user="ada"), job(0, 100, 8, user="bob")))
    assert figures.completion == Spread(mean=150, median=100, p99=200)
    assert figures.wait == Spread(mean=50, median=0, p99=100)
    assert figures.slowdown.mean == 1.5
    assert figures.utilization == 1.0
    assert figures.fairness == pytest.approx(1.5**2 / (2 * 1.25))
    assert figures.makespan == 200


def test_idle_gpus_on_partly_used_nodes_are_told_while_jobs_wait() -> None:
    figures = figures_of(play(job(0, 100, 5), job(0, 100, 8)))
    assert figures.idle_while_waiting == pytest.approx(3 / 16)
    assert figures.fragmentation == 1.0


TRACES = st.lists(
    st.builds(
        TraceJob,
        at=st.integers(0, 50).map(float),
        seconds=st.integers(1, 60).map(float),
        ranks=st.integers(1, 9),
        gpus=st.sampled_from([1.0, 1.0, 0.5]),
        user=st.sampled_from("ab"),
        priority=st.sampled_from([50, 50, 60]),
    ),
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(trace=TRACES, policy=st.sampled_from(sorted(POLICIES)))
def test_every_job_runs_whole_and_no_gpu_is_given_twice(trace: list[TraceJob], policy: str) -> None:
    outcome = Simulation(trace, TWO_NODES, policy, checkpoint_seconds=10).run()
    assert len(outcome.ran) + len(outcome.refused) == len(trace)
    assert all(one.ended_at >= one.started_at + one.job.seconds for one in outcome.ran)
    used = sum(one.job.seconds * one.job.all_gpus + one.lost for one in outcome.ran)
    assert outcome.usage.busy == pytest.approx(used)
    starts = {at for one in outcome.ran for at in (one.started_at, one.ended_at)}
    for at in starts:
        assert sum(one.job.all_gpus for one in outcome.ran if _surely_runs(one, at)) <= 8
    assert outcome == Simulation(trace, TWO_NODES, policy, checkpoint_seconds=10).run()


def _surely_runs(one: Ran, at: float) -> bool:
    return one.preemptions == 0 and one.started_at <= at < one.ended_at
