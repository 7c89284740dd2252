"""The benchmarks of the scheduler, run tiny."""

from __future__ import annotations

from benchmarks import policy_quality
from orchestrator.core.simulation import TraceJob

TWO = [TraceJob(at=0.0, seconds=100.0, ranks=8), TraceJob(at=1.0, seconds=10.0, ranks=8)]


def test_each_family_is_held_against_fifo_and_the_bound() -> None:
    found = policy_quality.measure(jobs=40, nodes="1x8", seeds=2, trace=TWO)
    assert set(found["families"]) == {"philly", "bursty", "large", "exponential", "trace"}
    assert found["ours"]["n"] == 8
    ratios = policy_quality.ratios(TWO, "1x8")
    assert ratios["mean_over_bound"] == (100 + 109) / (110 + 10)
    assert ratios["mean_over_fifo"] == ratios["mean_over_bound"] / ratios["fifo_over_bound"] == 1


def test_the_bound_stops_the_longer_job_for_the_shorter_one() -> None:
    trace = [
        TraceJob(at=at, seconds=seconds, ranks=ranks) for at, seconds, ranks in ((0, 100, 8), (10, 5, 8), (20, 1, 9))
    ]
    outcome = policy_quality.shortest_remaining(trace, 8)
    assert sorted((one.job.at, one.started_at, one.ended_at) for one in outcome.ran) == [(0, 0, 105), (10, 10, 15)]
    assert sum(one.preemptions for one in outcome.ran) == 1
    assert len(outcome.refused) == 1
