"""The benchmark of a wide gang, run small."""

from __future__ import annotations

from benchmarks import gang_scale


def test_a_job_lives_to_its_end_and_both_its_cost_and_its_longest_slice_are_measured() -> None:
    cost = gang_scale.life(2 * gang_scale.GPUS_PER_NODE)
    assert 0.0 < cost.slice_seconds < cost.seconds
