"""The benchmarks of the scheduler, run tiny."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import policy_quality, simulate_scale
from orchestrator.core.simulation import TraceJob


def test_a_trace_and_decisions_are_timed() -> None:
    found = simulate_scale.measure(jobs=50, queued=30, nodes="3x8", rounds=2)
    assert found["ours"]["n"] == 1
    assert found["decision"]["n"] == found["decision_with_limits"]["n"] == 4


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


def test_policies_are_compared_in_several_calls(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    with pytest.raises(ValueError, match="no trace was done within 0 s"):
        policy_quality.measure(jobs=40, nodes="1x8", seeds=1, trace=TWO, keep=keep, seconds=0.0)
    whole = policy_quality.measure(jobs=40, nodes="1x8", seeds=1, trace=TWO, keep=keep)
    assert (len(whole["families"]), len(keep.read_text().splitlines())) == (5, 5)
    again = policy_quality.measure(jobs=40, nodes="1x8", seeds=1, trace=TWO, keep=keep, seconds=0.0)
    assert again["families"] == whole["families"], "nothing is run again"
    with pytest.raises(ValueError, match="no trace was done"):
        policy_quality.measure(jobs=41, nodes="1x8", seeds=1, keep=keep, seconds=0.0)


def test_a_trace_is_cut_in_its_middle_and_has_the_nodes_of_its_load() -> None:
    trace = [TraceJob(at=10.0 * n, seconds=36.0, ranks=8) for n in range(100)]
    (first, second) = policy_quality.cuts(trace, 40, 2)
    assert (first[0].at, first[-1].at, second[0].at, len(second)) == (100.0, 490.0, 500.0, 40)
    assert policy_quality.cuts(trace, 1000, 3) == [trace]
    assert policy_quality.nodes_for(trace) == "5x8", "a job of 8 GPUs and 36 seconds every 9.9 seconds, at 0.9"
