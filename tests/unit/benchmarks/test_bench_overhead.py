"""The overhead of ``orch bench`` per step: loops that differ in nothing else, and intervals over groups of turns."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bench_overhead import ARMS, CASES, instructions, loops, of_groups, verdict


def test_every_loop_makes_steps_and_ours_adds_few_instructions() -> None:
    turns = loops("medium", apart_first=True)
    assert tuple(turns) == ARMS
    for turn in turns.values():
        turn(1)  # the first step makes the optimizer's state
    counted = {arm: instructions(turn) for arm, turn in turns.items()}
    assert counted["by_hand"] == counted["control"] == counted["apart"]
    assert 0 < counted["ours"] - counted["by_hand"] < 0.02 * counted["by_hand"]


def test_the_interval_counts_what_groups_differ_by() -> None:
    """Pairs of one process say nothing about the next: without the groups, the interval would be ten times too narrow."""
    generator = np.random.default_rng(1)
    groups = []
    for shift in (0.98, 0.99, 1.0, 1.01, 1.02):
        by_hand = generator.uniform(1, 2, size=100)
        groups.append({"by_hand": by_hand.tolist(), "ours": (by_hand * shift).tolist()})
    found = of_groups(groups, lambda one: one["ours"] / one["by_hand"])
    assert found["median"] == pytest.approx(1.0)
    assert found["low"] < 0.99 < 1.01 < found["high"]
    alike = of_groups(groups[2:3] * 5, lambda one: one["ours"] / one["by_hand"])
    assert alike["high"] - alike["low"] < 1e-9


def test_every_case_is_a_model() -> None:
    assert all(loops(model, apart_first=False) for model in CASES)


@pytest.mark.parametrize(
    ("ours", "control", "said"),
    [
        ((0.998, 1.004), (0.99, 1.02), "met"),
        ((1.006, 1.02), (0.99, 1.02), "missed"),
        ((0.99, 1.02), (0.99, 1.02), "not shown: two loops by hand differ by more"),
        ((0.99, 1.02), (0.999, 1.001), "not shown"),
    ],
)
def test_a_target_is_met_missed_or_not_shown(
    ours: tuple[float, float], control: tuple[float, float], said: str
) -> None:
    interval = {
        name: {"low": low, "high": high} for name, (low, high) in (("by_hand", ours), ("control_by_hand", control))
    }
    assert verdict(interval) == said
