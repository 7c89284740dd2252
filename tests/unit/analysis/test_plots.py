"""Lines and grids of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from orchestrator.analysis.plots import (
    MOST_POINTS,
    finish,
    grid_of,
    new_figure,
    thinned,
    time_axis,
    write_memory_comparison,
)
from tests.unit.analysis.runs import gpu, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("gpus", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (6, (2, 3)), (8, (2, 4)), (10, (3, 4)), (64, (8, 8))]
)
def test_the_grid_follows_the_number_of_gpus(gpus: int, grid: tuple[int, int]) -> None:
    assert grid_of(gpus) == grid


def test_a_long_line_keeps_its_peaks() -> None:
    values = np.zeros(50_000)
    values[31_234] = 7.0
    times, line = thinned(np.arange(50_000.0), values)
    assert len(line) < 1.1 * MOST_POINTS
    assert np.nanmax(line) == 7.0
    assert not np.isnan(line).any()
    assert (times[0], times[-1]) == (0.0, 49_999.0)


def test_a_line_is_broken_where_nothing_was_measured() -> None:
    times = np.concatenate((np.arange(10.0), 100 + np.arange(10.0)))
    _, line = thinned(times, np.ones(20))
    assert np.flatnonzero(np.isnan(line)).tolist() == [10]


def test_time_has_the_unit_that_suits_the_run() -> None:
    assert [time_axis(0.0, seconds).unit for seconds in (60, 3600, 86400)] == ["s", "min", "h"]


def test_a_line_of_nearly_equal_values_does_not_lie_on_the_edge() -> None:
    figure = new_figure(4, 3)
    panel = figure.subplots()
    panel.plot([0, 1, 2], [1710.0, 1712.0, 1711.0])
    finish(panel, y="clock (MHz)")
    low, high = panel.get_ylim()
    assert low == 0
    assert high >= 1.04 * 1712


def test_memory_that_was_never_used_is_drawn(tmp_path: Path) -> None:
    """An axis from 0 to 0 raises a warning, and warnings are errors in the tests."""
    idle = run(gpu(memory=np.zeros(60)))
    assert write_memory_comparison([idle], tmp_path / "memory.png").exists()
