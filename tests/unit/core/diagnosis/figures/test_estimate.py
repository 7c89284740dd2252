"""Differences count by their improbability under chance."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.diagnosis.figures import above, estimate


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


def test_few_samples_are_less_certain_than_many() -> None:
    few, many = estimate([1.0, 1.1, 0.9, 1.05, 0.95]), estimate([1.0, 1.1, 0.9, 1.05, 0.95] * 6)
    assert few.error > 3.0 * many.error
