"""Estimates of time left: times that are excluded, times that are included, and the coverage of the intervals."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from orchestrator.core.estimates import Mark, StepHistory, time_left

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

START = 1.7e9


def steady(first: int, last: int, seconds: float, *, at: float = START, attempt: int = 1) -> list[Mark]:
    """Return a mark for each step from ``first`` to ``last``, ``seconds`` apart."""
    return [Mark(at + seconds * (step - first), attempt, step) for step in range(first, last + 1)]


def left(marks: Sequence[Mark], total: int = 1000, **fields: float) -> float:
    found = time_left(marks, total, **fields)  # type: ignore[arg-type]
    assert found is not None
    return found.seconds


def test_steps_of_one_length_take_as_long_again() -> None:
    found = time_left(steady(0, 100, 2.0), 1000)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.seconds == pytest.approx(1800.0)
    assert found.low <= found.seconds <= found.high
    assert found.high - found.low == pytest.approx(2 * math.hypot(18.0, 1.0)), "a hundredth and a second to each side"


@pytest.mark.parametrize(
    ("marks", "total"),
    [([], 100), ([Mark(START, 1, 5)], 100), (steady(0, 9, 1.0), 0), ([Mark(START, 1, 5), Mark(START + 9, 2, 5)], 100)],
    ids=["nothing", "one report", "no total", "one report of each attempt"],
)
def test_too_little_gives_no_estimate(marks: list[Mark], total: int) -> None:
    assert time_left(marks, total) is None


def test_a_few_steps_have_an_estimate_and_no_interval() -> None:
    found = time_left(steady(0, 4, 2.0), 100)
    assert found is not None
    assert (found.seconds, found.low, found.high) == (192.0, None, None)


def test_warm_up_is_left_out() -> None:
    slow = [Mark(START, 1, 0), Mark(START + 60, 1, 1), Mark(START + 80, 1, 2)]
    assert left([*slow, *steady(3, 60, 1.0, at=START + 81)]) == pytest.approx(940.0)


def test_a_restart_and_the_way_to_it_are_left_out() -> None:
    again = steady(30, 80, 1.0, at=START + 500, attempt=2)
    assert left([*steady(0, 50, 1.0), *again]) == pytest.approx(920.0)


def test_a_new_attempt_goes_by_the_one_before_it_until_it_has_steps_of_its_own() -> None:
    before = steady(0, 50, 1.0)
    assert left([*before, Mark(START + 300, 2, 40)]) == pytest.approx(960.0)
    slower = steady(40, 60, 3.0, at=START + 300, attempt=2)
    assert left([*before, *slower]) == pytest.approx(3 * 940.0)


def test_one_pause_is_not_counted_and_widens_only_the_upper_bound() -> None:
    calm = time_left(steady(0, 200, 1.0), 1000)
    found = time_left([*steady(0, 100, 1.0), *steady(101, 200, 1.0, at=START + 1000)], 1000)
    assert found is not None
    assert calm is not None
    assert calm.high is not None
    assert found.seconds == pytest.approx(800.0)
    assert found.low == calm.low
    assert found.high is not None
    assert found.high > calm.high + 800


def evaluating(phase: str) -> Iterator[Mark]:
    at = START
    for step in range(221):
        yield Mark(at, 1, step, "training")
        if step and step % 50 == 0:
            yield Mark(at, 1, step, phase)
            at += 30.0
            yield Mark(at, 1, step, "training")
        at += 1.0


@pytest.mark.parametrize("phase", ["evaluating", "training"])
def test_evaluations_that_come_again_are_counted(phase: str) -> None:
    history = StepHistory()
    for mark in evaluating(phase):
        history.add(mark)
    found = time_left(history.marks, 1000)
    assert found is not None
    assert found.seconds == pytest.approx(780 + 16 * 30, rel=0.01)
    assert found.stop_seconds == pytest.approx(16 * 30, rel=0.01)


def test_the_first_evaluation_that_says_so_is_taken_to_come_again() -> None:
    history = StepHistory()
    for mark in evaluating("eval"):
        if mark.step <= 80:
            history.add(mark)
    assert left(history.marks) == pytest.approx(920 + 19 * 30, rel=0.01)


def test_a_script_whose_steps_become_slower_is_estimated_by_its_last_ones() -> None:
    marks = [*steady(0, 300, 1.0), *steady(301, 500, 2.0, at=START + 302)]
    assert left(marks) == pytest.approx(1000.0, rel=0.1)


def test_a_history_keeps_what_is_new() -> None:
    history = StepHistory()
    assert history.add(Mark(1.0, 2, 5))
    assert not history.add(Mark(1.1, 2, 6)), "too soon"
    assert not history.add(Mark(9.0, 2, 5)), "nothing new"
    assert not history.add(Mark(9.0, 1, 9)), "of an attempt before"
    assert history.add(Mark(1.2, 2, 5, "eval"))
    assert history.marks == (Mark(1.0, 2, 5, "eval"),)
    assert history.add(Mark(1.3, 3, 5)), "a new attempt is news at once"


def noisy(dice: random.Random, steps: int, alike: float) -> list[float]:
    """Return step times around 1 with a correlation of ``alike`` between neighbours; the first two are slow."""
    deviation, found = dice.gauss(0.0, 0.1), []
    for step in range(steps):
        deviation = alike * deviation + dice.gauss(0.0, 0.1 * math.sqrt(1 - alike * alike))
        found.append(max(0.2, 1 + deviation) * (5.0 if step < 2 else 1.0))
    return found


def evaluations(dice: random.Random, steps: int) -> list[float]:
    times = noisy(dice, steps, 0.0)
    return [time + (dice.uniform(9, 11) if step % 25 == 24 else 0.0) for step, time in enumerate(times)]


@pytest.mark.parametrize(
    ("times", "share", "least"),
    [
        (lambda dice: noisy(dice, 400, 0.0), 0.25, 0.91),
        (lambda dice: noisy(dice, 400, 0.0), 0.75, 0.91),
        (lambda dice: noisy(dice, 400, 0.9), 0.5, 0.9),
        (lambda dice: noisy(dice, 400, 0.9), 0.9, 0.9),
        (lambda dice: evaluations(dice, 400), 0.5, 0.95),
    ],
    ids=["independent, early", "independent, late", "sluggish", "sluggish, late", "evaluations"],
)
def test_intervals_hold_what_comes(times: Callable[[random.Random], list[float]], share: float, least: float) -> None:
    held = 0
    for seed in range(80):
        seconds = times(random.Random(seed))
        history, at, cut = StepHistory(), START, int(share * len(seconds))
        for step, each in enumerate(seconds[:cut], 1):
            at += each
            history.add(Mark(at, 1, step))
        found = time_left(history.marks, len(seconds))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= sum(seconds[cut:]) <= found.high
    assert held / 80 >= least
