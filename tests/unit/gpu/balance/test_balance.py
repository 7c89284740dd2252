"""Load balance: the same numbers as PromQL's, and no number without data."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.gpu.balance.balance import Balance, Band, GpuLoad, LoadPoint, LoadWindow, Quantity, balance, band
from tests.unit.gpu.support import sample


def loads(*utilizations: float | None, power: float | None = 300.0) -> dict[str, GpuLoad | None]:
    return {
        f"g{index}": None
        if value is None
        else GpuLoad(utilization=value, memory=1e9, power=power if power is not None else None)
        for index, value in enumerate(utilizations)
    }


def utilization(result: Balance) -> float | None:
    spread = result.spread(Quantity.UTILIZATION)
    return spread.cv if spread is not None else None


@pytest.mark.parametrize(
    ("cv", "expected"),
    [
        (0.0, Band.EXCELLENT),
        (0.0499, Band.EXCELLENT),
        (0.05, Band.GOOD),
        (0.0999, Band.GOOD),
        (0.10, Band.FAIR),
        (0.1999, Band.FAIR),
        (0.20, Band.POOR),
        (3.0, Band.POOR),
    ],
)
def test_bands(cv: float, expected: Band) -> None:
    assert band(cv) is expected


def test_equal_loads_have_no_spread() -> None:
    assert utilization(balance(loads(0.9, 0.9, 0.9, 0.9))) == 0.0


@pytest.mark.parametrize("count", [2, 4, 8, 27, 64])
def test_one_idle_gpu_of_n_thins_out_and_min_per_median_does_not(count: int) -> None:
    spread = balance(loads(*[1.0] * (count - 1), 0.0)).spread(Quantity.UTILIZATION)
    assert spread is not None
    assert spread.cv == pytest.approx(1 / math.sqrt(count - 1))
    assert spread.min_per_median == 0.0


def test_one_gpu_has_no_value() -> None:
    assert balance(loads(0.9)).spreads == ()


@pytest.mark.parametrize("values", [(0.0, 0.02), (0.05, 0.05), (0.0, 0.0)])
def test_an_idle_job_has_no_value(values: tuple[float, ...]) -> None:
    assert balance(loads(*values)).spreads == ()


def test_just_above_idle_has_a_value() -> None:
    assert utilization(balance(loads(0.06, 0.06))) == 0.0


def test_silent_gpus_are_named_and_left_out() -> None:
    result = balance(loads(0.9, None, 0.9, None))
    assert (result.gpus, result.silent) == (4, ("g1", "g3"))
    assert utilization(result) == 0.0


def test_only_one_gpu_that_speaks_has_no_value() -> None:
    result = balance(loads(0.9, None))
    assert (result.spreads, result.silent) == ((), ("g1",))


def test_power_shows_what_utilization_hides() -> None:
    result = balance(
        {
            "g0": GpuLoad(utilization=1.0, memory=1e9, power=650.0),
            "g1": GpuLoad(utilization=1.0, memory=1e9, power=300.0),
        }
    )
    assert utilization(result) == 0.0
    worst = result.worst
    assert worst is not None
    assert (worst.quantity, worst.band) == (Quantity.POWER, Band.POOR)


def test_an_absent_quantity_has_no_value() -> None:
    result = balance(loads(0.9, 0.9, power=None))
    assert result.spread(Quantity.POWER) is None
    assert result.spread(Quantity.MEMORY) is not None


def test_no_minimum_over_an_idle_median() -> None:
    spread = balance(loads(0.9, 0.0, 0.0)).spread(Quantity.UTILIZATION)
    assert spread is not None
    assert spread.min_per_median is None


@given(st.lists(st.floats(0.06, 1.0), min_size=2, max_size=64))
def test_it_is_the_population_formula(values: list[float]) -> None:
    cv = utilization(balance(loads(*values)))
    assert cv is not None
    assert cv == pytest.approx(statistics.pstdev(values) / statistics.fmean(values), abs=1e-9)
    assert 0.0 <= cv <= math.sqrt(len(values) - 1) + 1e-9


def test_the_window_averages_like_avg_over_time() -> None:
    window = LoadWindow(60.0)
    for second in range(0, 130, 10):
        window.add(sample("g0", at=float(second), utilization=second / 130, power_watts=100.0 + second))
        window.add(sample("g1", at=float(second), utilization=0.5))
    load = window.load("g0", 120.0)
    assert load is not None
    inside = [second for second in range(0, 130, 10) if 60 < second <= 120]
    assert load.utilization == pytest.approx(statistics.fmean(second / 130 for second in inside))
    assert load.power == pytest.approx(statistics.fmean(100.0 + second for second in inside))
    other = window.load("g1", 120.0)
    assert other is not None
    assert (other.power, other.memory) == (None, None)


def test_a_gpu_without_a_sample_in_the_window_is_silent() -> None:
    window = LoadWindow(60.0)
    window.add(sample("g0", at=0.0, utilization=0.9))
    window.add(sample("g1", at=59.0, utilization=0.9))
    assert window.balance(["g0", "g1", "g2"], 61.0).silent == ("g0", "g2")
    assert window.load("g0", 61.0) is None


def test_points_from_afar_fill_the_window_by_their_age() -> None:
    load = GpuLoad(utilization=0.5, memory=1.0, power=100.0)
    points = [LoadPoint(timestamp=float(at), age_seconds=70.0 - at, load=load) for at in range(70)]
    window = LoadWindow(60.0)
    window.add_points("g", points, 1000.0)
    assert window.load("g", 1000.0) == load
    assert window.load("g", 1058.0) == load
    assert window.load("g", 1061.0) is None


def test_a_report_that_came_late_stands_after_what_is_known() -> None:
    window = LoadWindow(60.0)
    for age, power in ((0.0, 100.0), (0.5, 300.0)):
        load = GpuLoad(utilization=1.0, memory=None, power=power)
        window.add_points("g", [LoadPoint(timestamp=age, age_seconds=age, load=load)], 1000.0)
    found = window.load("g", 1000.0)
    assert found is not None
    assert found.power == 200.0
