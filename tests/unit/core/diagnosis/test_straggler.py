"""The slow rank is named by its own time, never by the time that it waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.diagnosis.straggler import LEAST_FACTOR, Pace, find_straggler, paces


def in_step(*own: float | None, step: float = 1.0) -> list[Pace]:
    return [Pace(rank=rank, step_seconds=step, own_seconds=value) for rank, value in enumerate(own)]


def test_in_lock_step_the_rank_with_the_longest_own_time_is_named_with_its_factor() -> None:
    found = find_straggler(in_step(0.4, 0.9, 0.5, 0.4))
    assert found is not None
    assert (found.rank, found.seconds, found.usual_seconds) == (1, 0.9, 0.4)
    assert found.factor == pytest.approx(2.25)


def test_ranks_that_do_not_wait_for_each_other_are_told_apart_by_their_steps() -> None:
    found = find_straggler([Pace(rank=0, step_seconds=0.1), Pace(rank=1, step_seconds=0.6)])
    assert found is not None
    assert found.rank == 1
    assert found.factor == pytest.approx(6.0)


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        in_step(0.9),
        in_step(0.50, 0.56),
        in_step(0.4, None),
        in_step(0.02, 0.08),  # four times as much of next to nothing: the step is spent elsewhere
        in_step(0.0, 0.0),
        [Pace(rank=0, step_seconds=0.1), Pace(rank=1)],
        [Pace(rank=0, step_seconds=1.0), Pace(rank=1, step_seconds=1.3)],  # rank 0 saves, which is no part of its step
    ],
)
def test_nobody_is_named_where_the_numbers_do_not_say_so(ranks: list[Pace]) -> None:
    assert find_straggler(ranks) is None


def test_measured_parts_come_before_processor_time_and_only_where_every_rank_has_them() -> None:
    steps, busy = {0: 1.0, 1: 1.0}, {0: 0.3, 1: 0.9}
    parts = {0: {"data_seconds": 0.1, "forward_seconds": 0.4, "backward_seconds": 0.5}}
    assert [p.own_seconds for p in paces(steps, parts, busy)] == [0.3, 0.9]
    parts[1] = {"data_seconds": 0.2, "forward_seconds": 0.4, "backward_seconds": 0.4}
    assert [p.own_seconds for p in paces(steps, parts, busy)] == [pytest.approx(0.5), pytest.approx(0.6)]
    assert [p.own_seconds for p in paces(steps, {}, {0: 0.3, 1: None})] == [None, None]


@given(st.lists(st.floats(0.5, 0.5 * LEAST_FACTOR, exclude_max=True), max_size=9))
def test_ranks_within_the_factor_are_never_named(own: list[float]) -> None:
    assert find_straggler(in_step(*own)) is None
