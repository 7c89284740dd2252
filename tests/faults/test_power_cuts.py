"""One power cut at each point of a job's life, on a disk that loses what was not synced; `benchmarks/power_cuts.py` makes hundreds."""

from __future__ import annotations

from benchmarks.power_cuts import cut_power

POINTS = 8


def test_nothing_is_lost_and_nothing_succeeds_out_of_nothing() -> None:
    found = cut_power(POINTS, seed=1)
    assert found.problems == []
    assert len(found.cuts) == POINTS
    assert found.acknowledged > 0
