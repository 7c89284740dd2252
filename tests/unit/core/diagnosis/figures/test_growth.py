"""Steady growth of memory is distinguished from a cache that fills, batches of varied length, and gaps in the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.core.diagnosis.figures import GrowthWindow


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
