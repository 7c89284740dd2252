"""One power cut at each point of a job's life, on a disk that loses what was not synced; `benchmarks/power_cuts.py` makes hundreds."""

from __future__ import annotations

import pytest

from benchmarks.power_cuts import cut_power


@pytest.mark.parametrize("points", [2, pytest.param(8, marks=pytest.mark.rare)])
def test_nothing_is_lost_and_nothing_succeeds_out_of_nothing(points: int) -> None:
    found = cut_power(points, seed=1)
    assert found.problems == []
    assert len(found.cuts) == points
    assert found.acknowledged > 0
