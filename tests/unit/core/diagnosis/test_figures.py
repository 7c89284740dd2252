"""Figures that several rules share: windows of errors and losses, robust estimates, growth."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.figures import (
    NO_ERRORS,
    ErrorWindow,
    GrowthWindow,
    LossFigures,
    LossWindow,
    above,
    estimate,
)
from orchestrator.core.diagnosis.observation import GpuSeen
from orchestrator.core.thresholds import COUNTED_SECONDS


def gpu(uncorrected: int | None, corrected: int | None = None, remapped: int | None = None) -> GpuSeen:
    return GpuSeen(gpu_uuid="g", rank=0, uncorrected=uncorrected, corrected=corrected, remapped=remapped)


def test_what_was_counted_before_says_nothing_of_the_attempt() -> None:
    window = ErrorWindow()
    window.add(0.0, gpu(7, 1000, 3))
    assert window.errors() == NO_ERRORS
    window.add(2.0, gpu(9, 1005, 4))
    found = window.errors()
    assert (found.uncorrected, found.corrected, found.remapped) == (2, 5, 1)
    window.add(4.0, gpu(0, 0, None))
    window.add(6.0, gpu(1, 2, 4))
    found = window.errors()
    assert (found.uncorrected, found.corrected, found.remapped) == (3, 7, 1)


def test_corrected_errors_are_those_of_the_newest_minutes() -> None:
    window = ErrorWindow()
    window.add(0.0, gpu(None, 0))
    window.add(2.0, gpu(None, 50))
    assert window.errors().corrected == 50
    window.add(3.0 + COUNTED_SECONDS, gpu(None, 51))
    assert window.errors().corrected == 1


def test_outliers_change_no_estimate() -> None:
    calm = [1.0 + 0.001 * (place % 5) for place in range(20)]
    assert estimate([*calm, 90.0, 80.0]).value == pytest.approx(estimate(calm).value, rel=0.01)


def test_noise_is_not_certain_and_a_difference_is() -> None:
    rnd = random.Random(7)
    noisy = [estimate([rnd.gauss(1.0, 0.3) for _ in range(20)]) for _ in range(400)]
    most = max(above(noisy[place], noisy[place + 1 : place + 4]).deviations for place in range(396))
    assert most < 4.5
    slow = estimate([rnd.gauss(2.0, 0.3) for _ in range(20)])
    assert above(slow, noisy[:3]).deviations > 6.0


def after(minutes: int, used: Callable[[float], float], *, gap_at: float | None = None) -> GrowthWindow:
    window = GrowthWindow()
    for second in range(0, minutes * 60, 10):
        skipped = 300.0 if gap_at is not None and second >= gap_at else 0.0
        window.add(second + skipped, used(float(second)))
    return window


def test_a_leak_is_steady_growth_with_its_pace() -> None:
    growth = after(13, lambda at: 1e9 + 1e6 * at).growth()
    assert growth is not None
    assert growth.per_second == pytest.approx(1e6)
    assert growth.used == pytest.approx(1e9 + 1e6 * (12 * 60 - 10))


@pytest.mark.parametrize(
    "used",
    [
        lambda _: 1e9,
        lambda at: 1e9 * (1.0 - 2.0 ** (-at / 120.0)),
        lambda at: 1e9 + 1e6 * min(at, 300.0),
        lambda at: 1e9 + 1e6 * at - (2e8 if at >= 600.0 else 0.0),
    ],
    ids=["constant", "a cache that fills", "grows for five minutes", "shrinks once"],
)
def test_what_is_no_leak(used: Callable[[float], float]) -> None:
    assert after(13, used).growth() is None


def test_ten_whole_minutes_are_needed_and_a_gap_begins_anew() -> None:
    assert after(11, lambda at: at).growth() is None
    assert after(13, lambda at: at, gap_at=400.0).growth() is None


def fed(values: list[float]) -> LossFigures:
    window = LossWindow("loss", values[0], 0, 0.0)
    for step, value in enumerate(values[1:], start=1):
        window.add(value, step, float(step))
    return window.figures(len(values), float(len(values)))


def noisy(count: int, level: float, seed: int = 1) -> list[float]:
    chance = random.Random(seed)
    return [level * chance.lognormvariate(0.0, 0.3) for _ in range(count)]


def test_a_loss_that_stays_high_has_jumped() -> None:
    figures = fed(noisy(100, 1.0) + noisy(d.JUMPED_VALUES, 9.0, seed=2))
    assert figures.jump is not None
    assert figures.jump >= 1.0
    assert figures.usual == pytest.approx(1.0, rel=0.2)
    assert figures.now == pytest.approx(9.0, rel=0.5)


@pytest.mark.parametrize(
    "values",
    [
        noisy(300, 1.0),
        noisy(100, 1.0) + [50.0] * (d.JUMPED_VALUES - 2) + noisy(2, 1.0, seed=3),
        [0.6 + 0.5 * (i % 150 < 20) + 0.001 * (i % 7) for i in range(460)],  # warm restarts
        [2.0 + math.sin(i / 60.0) + 0.001 * (i % 7) for i in range(500)],
        [5.0 / (1 + i) for i in range(200)],
        noisy(10, 1.0) + noisy(d.JUMPED_VALUES, 9.0),  # too few values
        [0.0, 1e-300] * 50,
    ],
)
def test_what_is_no_jump(values: list[float]) -> None:
    assert (fed(values).jump or 0.0) < 1.0


def test_a_loss_that_stays_where_it_has_jumped_to_is_usual_there() -> None:
    high = noisy(d.JUMP_ENDS_AFTER + 2 * d.JUMPED_VALUES, 9.0, seed=2)
    before = fed(noisy(100, 1.0) + high[: d.JUMP_ENDS_AFTER - 1])
    assert before.jump is not None
    assert before.jump >= 1.0
    after = fed(noisy(100, 1.0) + high)
    assert after.jump is not None
    assert after.jump < 0.5
