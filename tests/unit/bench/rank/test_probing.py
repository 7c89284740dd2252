"""The number of steps on which the ranks of a calibration agree."""

from __future__ import annotations

import pytest

from orchestrator.bench.rank.probing import reference_steps


@pytest.mark.parametrize(("pilot", "steps"), [(10.0, 10), (0.0025, 100), (0.00249, 100), (0.0000001, 200)])
def test_the_steps_of_a_reference_are_a_whole_number_whatever_a_step_takes(pilot: float, steps: int) -> None:
    """The number is always an int: with numbers of different types, ranks ended each other's all-reduce."""
    found = reference_steps(pilot)
    assert (found, type(found)) == (steps, int)
