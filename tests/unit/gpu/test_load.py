"""Load balance: the same numbers as PromQL's, and no number without data."""

from __future__ import annotations

import math
import statistics

import pytest

from orchestrator.gpu.load import Balance, Band, GpuLoad, LoadWindow, Quantity, balance, band
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


def test_gpus_without_a_utilization_are_compared_by_their_power() -> None:
    two = {name: GpuLoad(utilization=None, memory=None, power=watts) for name, watts in (("a", 400.0), ("b", 200.0))}
    (spread,) = balance(two).spreads
    assert (spread.quantity, spread.cv) == (Quantity.POWER, pytest.approx(1 / 3))
    assert balance({"a": None, "b": None}).spreads == ()


def test_no_minimum_over_an_idle_median() -> None:
    spread = balance(loads(0.9, 0.0, 0.0)).spread(Quantity.UTILIZATION)
    assert spread is not None
    assert spread.min_per_median is None


def test_the_window_averages_like_avg_over_time() -> None:
    window, bare = LoadWindow(60.0), LoadWindow(60.0)
    for second in range(0, 130, 10):
        window.add(sample("g0", at=float(second), utilization=second / 130, power_watts=100.0 + second))
        bare.add(sample("g1", at=float(second), utilization=0.5))
    load = window.load(120.0)
    assert load is not None
    inside = [second for second in range(0, 130, 10) if 60 < second <= 120]
    assert load.utilization == pytest.approx(statistics.fmean(second / 130 for second in inside))
    assert load.power == pytest.approx(statistics.fmean(100.0 + second for second in inside))
    other = bare.load(120.0)
    assert other is not None
    assert (other.power, other.memory) == (None, None)


def test_a_window_can_be_read_over_a_part_of_it() -> None:
    window = LoadWindow(60.0)
    for second in range(60):
        window.add(sample("g0", at=float(second), utilization=1.0, power_watts=300.0 if second < 40 else 200.0))
    assert window.load(60.0, 20.0) == GpuLoad(utilization=1.0, memory=None, power=200.0)
    everything = window.load(60.0, 3600.0)
    assert everything is not None
    assert everything.power == pytest.approx((39 * 300.0 + 20 * 200.0) / 59)


def test_a_gpu_without_a_sample_in_the_window_has_no_load() -> None:
    window = LoadWindow(60.0)
    assert window.load(0.0) is None
    window.add(sample("g0", at=0.0, utilization=0.9))
    assert window.load(59.0) is not None
    assert window.load(61.0) is None
