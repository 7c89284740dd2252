"""Intervals have their nominal coverage, also for few runs; outliers are named and kept."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.bench.statistics import deviation, mean_interval, outliers, ratio_interval, tail


def test_fewer_than_five_runs_have_a_mean_and_no_interval() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (found.value, found.bounds) == (2.5, None)
    assert ratio_interval([2.0] * 4, [1.0] * 4).bounds is None


def test_few_runs_are_read_further_out() -> None:
    assert tail(5) < tail(10) < tail(30) < 0.025
    assert tail(100_000) == pytest.approx(0.025, rel=1e-3)


@pytest.mark.parametrize(("runs", "student"), [(5, 2.776), (10, 2.262), (30, 2.045)])
def test_intervals_of_few_runs_are_as_wide_as_students(runs: int, student: float) -> None:
    random = np.random.default_rng(7)
    shares = []
    for _ in range(30):
        values = list(random.normal(100.0, 5.0, runs))
        interval = mean_interval(values)
        assert interval.low is not None
        assert interval.high is not None
        shares.append((interval.high - interval.low) / (2 * student * deviation(values) / runs**0.5))
    assert 0.85 < np.mean(shares) < 1.15


def test_a_ratio_leaves_out_what_a_round_shares() -> None:
    drift = np.linspace(1.0, 3.0, 20)
    random = np.random.default_rng(3)
    above = list(drift * 2 * random.normal(1, 0.005, 20))
    found = ratio_interval(above, list(drift))
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(2.0, rel=0.02)
    assert found.high - found.low < 0.05


def test_equal_figures_have_an_interval_without_width() -> None:
    assert mean_interval([2.0] * 5).bounds == (2.0, 2.0)


def test_outliers_are_positions_far_from_the_rest() -> None:
    assert outliers([10.0, 10.1, 9.9, 10.2, 30.0, 9.8]) == (4,)
    assert outliers([10.0, 10.1, 9.9, 10.2]) == ()
