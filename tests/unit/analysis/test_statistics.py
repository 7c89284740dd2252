"""Means over time, energy, intervals, balance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.analysis.run_summary import BEFORE, RESTARTING, balance_and_speed, cut, summarize_run
from orchestrator.analysis.runs import Quantity, progress_of
from orchestrator.analysis.statistics import (
    energy_curve,
    interval_about,
    mean_interval,
    mean_over_time,
    summarize,
)
from tests.unit.analysis.coverage import coverage
from tests.unit.analysis.runs import START, gpu, progress_row, run

NAN = float("nan")


def test_the_mean_is_over_time_not_over_samples() -> None:
    times = np.array([0.0, 1.0, 2.0, 2.1, 2.2, 2.3, 2.4])
    values = np.array([10.0, 10.0, 10.0, 100.0, 100.0, 100.0, 100.0])
    assert mean_over_time(times, values) == pytest.approx((20 + 5.5 + 30) / 2.4)
    assert mean_over_time(times, np.full(7, NAN)) is None
    assert mean_over_time(np.array([3.0]), np.array([7.0])) == 7.0


def test_a_gap_counts_neither_as_high_nor_as_low() -> None:
    times = np.array([0.0, 1.0, 2.0, 1000.0, 1001.0])
    found = summarize(times, np.array([1.0, 1.0, 1.0, 4.0, 4.0]))
    assert found is not None
    assert (found.mean, found.minimum, found.maximum) == (2.0, 1.0, 4.0)


def test_energy_is_the_counters_where_there_is_one_and_survives_its_restart() -> None:
    one = replace(gpu(seconds=5, power=100.0), energy_joules=np.array([50.0, 150.0, 250.0, 10.0, 110.0]))
    curve = energy_curve(one)
    assert curve is not None
    assert (curve.total, curve.counted, curve.between(START, START + 1)) == (300.0, True, 100.0)


def test_energy_without_a_counter_is_the_integral_of_power() -> None:
    curve = energy_curve(gpu(seconds=11, power=[NAN, *[200.0] * 10]))
    assert curve is not None
    assert (curve.total, curve.counted) == (1800.0, False)
    assert energy_curve(gpu(seconds=5, memory=1.0)) is None


@pytest.mark.parametrize(
    ("count", "memory"),
    [(n, m) for n in (20, 30) for m in (0.0, 0.5, 0.8, 0.95)] + [(50, 0.5), (50, 0.9), (200, 0.95), (3000, 0.8)],
)
def test_intervals_hold_what_they_promise_also_for_sluggish_series(count: int, memory: float) -> None:
    """The coverage is close to the nominal one, also for autocorrelated series; the generators are seeded."""
    assert 0.915 <= coverage(count, memory, 400) <= 0.98


def test_no_interval_where_the_data_do_not_give_one() -> None:
    assert mean_interval(np.arange(5.0)).low is None
    trend = mean_interval(np.linspace(0.0, 1.0, 60))
    assert trend.low is not None
    assert trend.low < 0.0, "one movement is worth next to nothing"
    exact = mean_interval(np.full(20, 3.0))
    assert (exact.value, exact.low, exact.high) == (3.0, 3.0, 3.0)
    assert exact.excludes_zero
    about = interval_about(7.0, np.array([-1.0, 1.0] * 20))
    assert (about.value, about.high) == (7.0, pytest.approx(7.0, abs=0.2))


def test_balance_needs_two_busy_gpus() -> None:
    even = [gpu(i, utilization=0.9, power=200.0, memory=[1000.0, 1001.0]) for i in range(4)]
    found = summarize_run(run(*even))
    assert [(one.quantity, round(one.cv, 3), one.band) for one in found.balance.spreads] == [
        ("utilization", 0.0, "excellent"),
        ("memory", 0.0, "excellent"),
        ("power", 0.0, "excellent"),
    ]
    assert summarize_run(run(even[0])).balance.spreads == ()
    idle = [gpu(i, utilization=0.02 * i, power=60.0, memory=1.0) for i in range(2)]
    assert summarize_run(run(*idle)).balance.spreads == ()
    windows = cut(run(*idle))
    assert windows is not None
    assert np.isnan(windows.cvs[Quantity.UTILIZATION]).all()


def test_one_idle_gpu_of_four_has_the_known_cv() -> None:
    windows = cut(run(*(gpu(i, utilization=0.0 if i == 3 else 0.8, power=100.0) for i in range(4))))
    assert windows is not None
    cvs = windows.cvs[Quantity.UTILIZATION]
    assert cvs == pytest.approx(np.full(len(cvs), 3**-0.5))


def uneven(slow: float) -> tuple[float, bool, bool]:
    """Return (gain of an even load, has an interval, excludes 0) for a run with longer steps while its last GPU idles."""
    generator = np.random.default_rng(3)
    lazy = generator.random(1200) < 0.5
    lazy = np.repeat(lazy[:300], 4)
    seconds = 0.1 * (1 + slow * lazy + 0.02 * generator.normal(size=1200))
    rows = [progress_row(at, int(step)) for at, step in enumerate(np.cumsum(1 / seconds))]
    gpus = (gpu(0, 1200, utilization=0.9), gpu(1, 1200, utilization=np.where(lazy, 0.5, 0.9)))
    found = run(*gpus, progress=progress_of(rows))
    windows = cut(found)
    assert windows is not None
    relation = balance_and_speed(found, windows)
    assert relation is not None
    return relation.gain.value, relation.gain.low is not None, relation.gain.excludes_zero


def test_an_uneven_load_that_costs_speed_is_found_out() -> None:
    gain, told, surely = uneven(slow=0.4)
    assert told
    assert surely
    assert 0.08 < gain < 0.3


def test_an_uneven_load_that_costs_nothing_is_not_blamed() -> None:
    _, told, surely = uneven(slow=0.0)
    assert told
    assert not surely


def test_energy_by_phase_adds_up() -> None:
    rows = [
        progress_row(10, 1),
        progress_row(20, 2, phase="evaluating"),
        progress_row(25, 3),
        progress_row(40, 3, attempt=2),
    ]
    found = summarize_run(run(gpu(seconds=61, power=100.0), progress=progress_of(rows)), price_per_kwh=0.5)
    assert found.energy_by_phase == {BEFORE: 1000.0, "training": 3000.0, "evaluating": 500.0, RESTARTING: 1500.0}
    assert found.energy_joules == 6000.0
    assert found.cost == pytest.approx(6000 / 3.6e6 * 0.5)
    assert found.speed is not None
    assert found.speed.attempts == 2


def test_speed_leaves_restarts_out_and_counts_repeated_samples_once() -> None:
    rows = [progress_row(at, at * 10) for at in range(20)]
    rows += [progress_row(60 + at, 150 + at * 10, attempt=2) for at in range(20)]
    found = summarize_run(run(gpu(seconds=80, power=50.0), progress=progress_of(rows))).speed
    assert found is not None
    assert found.samples_per_second == pytest.approx(320.0)
    assert found.step_seconds is not None
    assert found.step_seconds.value == pytest.approx(0.1)
    assert found.joules_per_sample == pytest.approx(79 * 50 / (32 * 340))


def test_fragmentation_is_a_share_with_a_trend() -> None:
    rows = [
        progress_row(at, at, {"memory_reserved_bytes": 100.0, "memory_allocated_bytes": 90.0 - at / 36})
        for at in range(361)
    ]
    found = summarize_run(run(gpu(seconds=400, power=1.0), progress=progress_of(rows))).fragmentation
    assert found is not None
    assert (round(found.mean_ratio, 3), round(found.last_ratio, 3)) == (0.15, 0.2)
    assert found.change_per_hour == pytest.approx(1.0)
