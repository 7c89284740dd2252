"""A jump of the loss needs many values; noise, spikes and slow swings are no jumps."""

from __future__ import annotations

import math
import random

import pytest

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.figures import LossFigures, LossWindow


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


def test_values_that_are_no_numbers_are_left_out() -> None:
    figures = fed(noisy(100, 1.0) + [math.nan, math.inf] * 10)
    assert figures.jump is not None
    assert math.isfinite(figures.jump)
    assert figures.jump < 1.0
