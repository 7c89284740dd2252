"""Periods with common times: timers of half a second, one and two seconds are due together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.runtime.beats import until_beat


@given(st.floats(min_value=0.0, max_value=1e7), st.sampled_from([0.5, 1.0, 2.0]))
def test_a_beat_comes_after_half_a_period_at_least_and_at_a_multiple(now: float, seconds: float) -> None:
    pause = until_beat(seconds, now)
    assert seconds / 2 < pause <= 1.5 * seconds
    assert abs((now + pause) / seconds - round((now + pause) / seconds)) < 1e-6


def test_timers_of_different_periods_are_due_together() -> None:
    assert {1000.25 + until_beat(seconds, 1000.25) for seconds in (0.5, 1.0)} == {1001.0}
    assert {1000.75 + until_beat(seconds, 1000.75) for seconds in (0.5, 1.0)} == {1001.5, 1002.0}
    assert until_beat(1.0, 5.0) == 1.0
    assert until_beat(1.0, 5.625) == 1.375, "late work does not repeat at once"
