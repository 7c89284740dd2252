"""Lines and grids of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from orchestrator.analysis.plots import (
    MAX_POINTS,
    grid_of,
    thinned,
)

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize(
    ("gpus", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (8, (2, 4)), (10, (3, 4)), (64, (8, 8))]
)
def test_the_grid_follows_the_number_of_gpus(gpus: int, grid: tuple[int, int]) -> None:
    assert grid_of(gpus) == grid


def test_a_long_line_keeps_its_peaks() -> None:
    values = np.zeros(50_000)
    values[31_234] = 7.0
    times, line = thinned(np.arange(50_000.0), values)
    assert len(line) < 1.1 * MAX_POINTS
    assert np.nanmax(line) == 7.0
    assert not np.isnan(line).any()
    assert (times[0], times[-1]) == (0.0, 49_999.0)


def test_a_line_is_broken_where_nothing_was_measured() -> None:
    times = np.concatenate((np.arange(10.0), 100 + np.arange(10.0)))
    _, line = thinned(times, np.ones(20))
    assert np.flatnonzero(np.isnan(line)).tolist() == [10]
