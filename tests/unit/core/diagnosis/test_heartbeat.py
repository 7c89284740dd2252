"""Times that a rank may be without progress: learned per phase, and only from observed times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.diagnosis.health import (
    FLOOR_SECONDS,
    LONGEST_TICK_SECONDS,
    PAUSE_SECONDS,
    REPORT_SECONDS,
    Heartbeat,
    LastProgress,
    Phase,
)


class Trace:
    """A heartbeat and its clock."""

    def __init__(self, ranks: int = 2) -> None:
        self.now = 1000.0
        self.pulse = Heartbeat(ranks, self.now)

    def pass_by(self, seconds: float, tick: float = 0.5) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + tick)
            self.pulse.tick(self.now)

    def step(self, *durations: float, ranks: int = 2, phase: str = "", saving: bool = False, steps: int = 10) -> None:
        for rank in range(ranks):
            self.pulse.beat(LastProgress(rank=rank, phase=phase, saving=saving, steps=steps, step_seconds=durations))


def test_a_rank_may_be_still_for_three_usual_steps_or_the_floor() -> None:
    trace = Trace()
    trace.step(*[0.1] * 8)
    assert (trace.pulse.phase, trace.pulse.usual_seconds) == (Phase.STEP, 0.1)
    assert trace.pulse.stopped_after == trace.pulse.locked_after == FLOOR_SECONDS
    trace.step(*[4.0] * 8)
    assert trace.pulse.locked_after == 12.0
    trace.pass_by(5.0)
    assert trace.pulse.still_seconds == pytest.approx(5.0)


def test_first_steps_are_never_too_long() -> None:
    trace = Trace()
    trace.pass_by(3600.0)
    assert trace.pulse.phase is Phase.STARTUP
    assert trace.pulse.locked_after is trace.pulse.reported_after is None
    assert not trace.pulse.reports
    trace.step(900.0, 20.0, steps=3)  # compilation; a pace needs more steps than these
    assert trace.pulse.phase is Phase.STARTUP
    assert trace.pulse.reports


def test_evaluation_and_saving_have_a_patience_of_their_own_that_grows_with_what_was_seen() -> None:
    for phase, saving, expected in (("evaluate", False, Phase.EVALUATION), ("train", True, Phase.CHECKPOINT)):
        trace = Trace()
        trace.step(*[0.1] * 8)
        trace.step(*[0.1] * 8, phase=phase, saving=saving)
        assert trace.pulse.phase is expected
        assert trace.pulse.locked_after == PAUSE_SECONDS
        assert trace.pulse.stopped_after == FLOOR_SECONDS
        trace.pass_by(40.0)
        trace.step(*[0.1] * 8)  # the job continues
        assert trace.pulse.locked_after == FLOOR_SECONDS
        trace.step(*[0.1] * 8, phase=phase, saving=saving)
        assert trace.pulse.locked_after == pytest.approx(120.0)


def test_a_rank_that_saves_speaks_for_the_others_that_wait_for_it() -> None:
    trace = Trace()
    trace.step(*[0.1] * 8)
    trace.pulse.beat(LastProgress(rank=1, saving=True, steps=10, step_seconds=(0.1,) * 8))
    assert trace.pulse.phase is Phase.CHECKPOINT


def test_a_machine_that_slept_makes_nobody_still() -> None:
    trace = Trace()
    trace.step(*[0.1] * 8)
    trace.now += 8 * 3600.0  # the machine was suspended
    trace.pulse.tick(trace.now)
    assert trace.pulse.still_seconds <= LONGEST_TICK_SECONDS < FLOOR_SECONDS


def test_ranks_that_never_report_are_not_judged_by_their_silence_when_others_do() -> None:
    trace = Trace(ranks=4)
    trace.step(*[0.1] * 8, ranks=1)
    trace.pass_by(100.0)
    trace.step(*[0.1] * 8, ranks=1)
    assert trace.pulse.still_seconds == 0.0


def test_a_rank_that_has_ended_is_not_still() -> None:
    trace = Trace()
    trace.step(*[0.1] * 8)
    trace.pass_by(10.0)
    trace.pulse.beat(LastProgress(rank=0, steps=99, step_seconds=(0.1,) * 8))
    assert trace.pulse.still_seconds == pytest.approx(10.0)
    trace.pulse.ended(1)
    assert trace.pulse.still_seconds == 0.0
    trace.pulse.ended(0)
    assert trace.pulse.still_seconds == 0.0
    trace.pulse.beat(LastProgress(rank=7))


def test_a_line_of_output_is_a_sign_of_life_of_a_job_that_reports_nothing() -> None:
    trace = Trace()
    trace.pass_by(50.0)
    assert trace.pulse.still_seconds == pytest.approx(50.0)
    trace.pulse.sign()
    assert trace.pulse.still_seconds == 0.0


def test_what_is_told_without_proof_takes_longer_than_the_longest_pause_so_far() -> None:
    trace = Trace()
    trace.step(*[0.1] * 8)
    assert trace.pulse.reported_after == REPORT_SECONDS
    trace.step(*[0.1] * 7, 30.0)
    assert trace.pulse.reported_after == 600.0


@given(st.lists(st.tuples(st.floats(0.001, 20.0), st.floats(0.0, 0.9)), min_size=6, max_size=40))
def test_a_healthy_job_is_never_still_for_longer_than_it_may_be(steps: list[tuple[float, float]]) -> None:
    """Steps of any length that vary by a tenth, reports at most once a second, evaluations in between."""
    usual = steps[0][0]
    trace = Trace()
    durations: tuple[float, ...] = ()
    for _, jitter in steps:
        seconds = usual * (1 + 0.1 * jitter)
        trace.pass_by(max(seconds, 1.0))
        locked = trace.pulse.locked_after
        assert locked is None or trace.pulse.still_seconds <= locked
        assert trace.pulse.reported_after is None or trace.pulse.still_seconds <= trace.pulse.reported_after
        durations = (*durations, seconds)[-32:]
        trace.step(*durations)


@given(st.floats(0.01, 5.0), st.floats(0.0, 29.0), st.booleans())
def test_a_pause_that_is_said_to_be_one_is_none_of_our_business(usual: float, pause: float, saving: bool) -> None:
    trace = Trace()
    trace.step(*[usual] * 8)
    trace.step(*[usual] * 8, phase="" if saving else "validate", saving=saving)
    trace.pass_by(pause)
    assert trace.pulse.locked_after is not None
    assert trace.pulse.still_seconds <= trace.pulse.locked_after
