"""The benchmarks of the scheduler, run tiny."""

from __future__ import annotations

from benchmarks import policy_quality, queue_depth, simulate_scale
from orchestrator.core.simulation.trace import TraceJob


def test_a_trace_and_decisions_are_timed() -> None:
    found = simulate_scale.measure(jobs=50, queued=30, nodes="3x8", rounds=2)
    assert found["ours"]["n"] == 1
    assert found["decision"]["n"] == 4


def test_a_long_queue_is_held_against_an_empty_one() -> None:
    found = queue_depth.measure(queued=30, nodes="3x8", rounds=2)
    assert found["ours"]["n"] == found["peers"]["empty"]["n"] == 2
    assert found["status"]["jobs"] == 30 + 7


def test_each_family_is_held_against_fifo_and_the_bound() -> None:
    trace = [TraceJob(at=0.0, seconds=100.0, ranks=8), TraceJob(at=1.0, seconds=10.0, ranks=8)]
    found = policy_quality.measure(jobs=40, nodes="1x8", seeds=2, trace=trace)
    assert set(found["families"]) == {"philly", "bursty", "large", "exponential", "trace"}
    assert found["families"]["trace"]["mean_over_bound"]["median"] == (100 + 109) / (110 + 10)
    assert found["ours"]["n"] == 8
