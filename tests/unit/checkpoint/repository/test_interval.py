"""The interval between saves that loses the least time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.repository.interval import (
    CHEAP_SHARE,
    LONGEST_SECONDS,
    choose_interval,
    mean_time_between_failures,
    optimal_interval,
)

SAVE = st.floats(1e-4, 100)
RECOVERY = st.floats(0, 100)
FAILURE = st.floats(100, 1e6)


def productive_share(interval, save, recovery, failure):
    """Return the share of time that advances training: a save per interval; a failure costs half of one, and the recovery."""
    return (1 - save / interval) / (1 + (recovery + interval / 2) / failure)


@given(SAVE, RECOVERY, FAILURE)
def test_no_interval_on_a_fine_grid_is_noticeably_better(save, recovery, failure):
    best = optimal_interval(save_seconds=save, recovery_seconds=recovery, failure_seconds=failure)
    share = productive_share(best, save, recovery, failure)
    grid = [best * 2 ** (n / 8) for n in range(-48, 49)]
    assert all(productive_share(other, save, recovery, failure) <= share + 1e-9 for other in grid if other > save)


def test_for_cheap_saves_it_is_youngs():
    assert optimal_interval(save_seconds=0.01, recovery_seconds=0, failure_seconds=3600) == pytest.approx(
        math.sqrt(2 * 3600 * 0.01), rel=0.01
    )


@pytest.mark.parametrize(("save", "recovery", "failure"), [(-1, 0, 1), (1, -1, 1), (1, 1, 0), (math.nan, 1, 1)])
def test_what_is_no_duration_is_refused(save, recovery, failure):
    with pytest.raises(ValueError, match="invalid durations"):
        optimal_interval(save_seconds=save, recovery_seconds=recovery, failure_seconds=failure)


def test_the_failure_rate_moves_from_the_belief_to_what_is_seen():
    assert mean_time_between_failures(failures=0, uptime_seconds=0, prior_seconds=1000) == 1000
    assert mean_time_between_failures(failures=0, uptime_seconds=9000, prior_seconds=1000) == 10_000
    assert mean_time_between_failures(failures=1000, uptime_seconds=60_000, prior_seconds=1000) == pytest.approx(
        60, rel=0.02
    )


@given(st.floats(0, 100), st.floats(0, 100), RECOVERY, FAILURE)
def test_a_choice_is_within_bounds(save, step, recovery, failure):
    choice = choose_interval(save_seconds=save, step_seconds=step, recovery_seconds=recovery, failure_seconds=failure)
    assert choice.steps >= 1
    assert choice.seconds <= LONGEST_SECONDS
    if step > 1e-3:
        assert abs(choice.steps * step - choice.seconds) <= max(step, 1e-9)


def test_a_choice_says_why():
    choice = choose_interval(save_seconds=0.0002, step_seconds=0.05, recovery_seconds=0.2, failure_seconds=4 * 3600)
    assert choice.reason == (
        "every step (50ms): a save takes 0.2ms, a step 50ms, a recovery 200ms, failures are expected every 4h;"
        " saves that take 0.5% of the time are made anyway, as the failure rate is an estimate"
    )


@given(st.floats(1e-4, 3), RECOVERY, FAILURE, st.floats(60, 1e6))
def test_a_wrong_belief_costs_little(save, recovery, failure, believed):
    """With cheap saves, the interval is close to the best one for the true failure rate, whatever rate is assumed."""
    choice = choose_interval(
        save_seconds=save, step_seconds=0.0, recovery_seconds=recovery, failure_seconds=max(believed, failure)
    )
    best = optimal_interval(save_seconds=save, recovery_seconds=recovery, failure_seconds=failure)
    lost = productive_share(best, save, recovery, failure) - productive_share(choice.seconds, save, recovery, failure)
    assert lost <= CHEAP_SHARE + save / CHEAP_SHARE / 2 / failure


def test_a_job_that_seems_never_to_fail_still_saves_as_often_as_costs_next_to_nothing():
    choice = choose_interval(save_seconds=0.005, step_seconds=0.05, recovery_seconds=0.2, failure_seconds=1e6)
    assert choice.steps == 20
