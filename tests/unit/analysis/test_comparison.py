"""Comparisons: alignment, intervals, outcomes, conditions, pictures."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.analysis.alignment import Align
from orchestrator.analysis.comparison import (
    CompareError,
    Comparison,
    Outcome,
    Row,
    broken,
    compare,
    comparison_text,
    parse_condition,
    sentence,
)
from orchestrator.analysis.runs import Run, progress_of
from tests.unit.analysis.runs import gpu, progress_row, run


def sluggish(generator: np.random.Generator, count: int, memory: float = 0.7, spread: float = 12.0) -> np.ndarray:
    noise = spread * generator.normal(size=count)
    for place in range(1, count):
        noise[place] += memory * noise[place - 1]
    return noise


def row(comparison: Comparison, name: str, letter: str = "B") -> Row:
    pair = next(pair for pair in comparison.pairs if pair.letter == letter)
    return next(row for row in pair.rows if row.measure.name == name)


def recorded(memory: float, seed: int, seconds: int = 900) -> Run:
    noise = sluggish(np.random.default_rng(seed), seconds)
    return run(gpu(seconds=seconds, memory=memory + noise, power=200.0), name=f"run-{seed}")


def training(step_seconds: float, loss: float, *, seconds: int = 300, seed: int = 1, **changes: float) -> Run:
    generator = np.random.default_rng(seed)
    rows = [
        progress_row(at, int(at / step_seconds), {"loss": loss / (1 + at) + 0.01 * generator.normal()})
        for at in range(seconds)
    ]
    return run(gpu(seconds=seconds, **{"power": 100.0, **changes}), name=f"run-{seed}", progress=progress_of(rows))


def test_the_sources_difference_is_found_and_nothing_else() -> None:
    """The difference of 7.5 per cent in memory (1494 to 1381.5 MiB) is found in fluctuating readings; none in power."""
    found = compare([recorded(1494.0, 1), recorded(1381.5, 2)])
    memory = row(found, "memory")
    assert memory.relative is not None
    assert memory.relative.low is not None
    assert memory.relative.high is not None
    assert memory.relative.low < -0.0753 < memory.relative.high
    assert memory.outcome is Outcome.LOWER
    assert sentence(memory, "B").startswith("B uses 7.")
    assert row(found, "power").outcome is Outcome.NONE_SHOWN
    assert "no difference in power that these data show" in comparison_text(found)


def test_intervals_of_differences_hold_what_they_promise() -> None:
    """In 93 to 97 per cent of 300 seeded comparisons of noisy readings, the interval contains the true difference."""
    hits = 0
    for seed in range(300):
        found = row(compare([recorded(1494.0, 2 * seed, 400), recorded(1381.5, 2 * seed + 1, 400)]), "memory").relative
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1381.5 / 1494.0 - 1 <= found.high
    assert 0.93 <= hits / 300 <= 0.97


def test_the_same_run_twice_differs_in_nothing() -> None:
    one = training(0.1, 1.0)
    found = compare([one, one])
    told = {row.outcome for row in found.pairs[0].rows}
    assert told == {Outcome.NONE_SHOWN, Outcome.SINGLE}


def test_a_loss_is_compared_at_equal_steps_and_at_equal_time() -> None:
    """The second run steps twice as fast with the same loss at each moment: it is equal by time and worse by step."""
    found = compare([training(0.1, 1.0), training(0.05, 1.0, seed=2)])
    assert found.align is Align.STEP
    assert row(found, "loss_at_equal_time").outcome is Outcome.NONE_SHOWN
    by_step = row(found, "loss_at_equal_steps")
    assert by_step.other > by_step.baseline
    assert row(found, "step_time").relative is not None
    assert row(found, "step_time").other == pytest.approx(50.0)
    assert row(found, "samples_per_second").other == pytest.approx(640.0)
    assert row(found, "joules_per_sample").baseline == pytest.approx(100 / 320, rel=0.01)


def test_curves_that_keep_apart_are_told_also_without_a_result() -> None:
    """The difference of two falling losses changes slowly, which a single pair of runs cannot distinguish from chance."""

    def falling(steps: float, seed: int) -> Run:
        noise = np.random.default_rng(seed).normal(size=60)
        rows = [
            progress_row(at, 10 * at, {"loss": 0.5 + 2.0 * np.exp(-at / steps) + 0.01 * noise[at]}) for at in range(60)
        ]
        return run(gpu(seconds=60), name=f"run-{seed}", progress=progress_of(rows))

    by_step = row(compare([falling(30.0, 1), falling(40.0, 2)]), "loss_at_equal_steps")
    assert by_step.outcome is Outcome.NONE_SHOWN
    assert by_step.higher_share > 0.95
    assert by_step.lower_share < 0.05
    assert " higher loss at equal steps on average, and higher in " in sentence(by_step, "B")
    assert sentence(by_step, "B").endswith("compare more runs of each")
    alike = row(compare([falling(30.0, 1), falling(30.0, 2)]), "loss_at_equal_steps")
    assert sentence(alike, "B").endswith(")")


def test_readings_of_different_rates_are_aligned_by_time_not_by_number() -> None:
    rising = gpu(seconds=600, memory=1000 + np.arange(600.0))
    sparse = run(gpu(seconds=600, memory=1000 + np.arange(600.0)), name="sparse")
    few = sparse.gpus[0]
    thin = type(few)(
        label=few.label,
        index=0,
        times=few.times[::5],
        values={name: values[::5] for name, values in few.values.items()},
        energy_joules=few.energy_joules[::5],
    )
    found = row(compare([run(rising), run(thin, name="thin")]), "memory")
    assert found.difference.value == pytest.approx(0.0, abs=2.5)


def test_what_a_restart_repeats_is_not_put_between_attempts() -> None:
    rows = [progress_row(at, at * 10) for at in range(100)]
    rows += [progress_row(400 + at, 800 + at * 10, attempt=2) for at in range(100)]
    restarted = run(gpu(seconds=500, power=[100.0]), name="restarted", progress=progress_of(rows))
    plain = run(
        gpu(seconds=180, power=100.0),
        name="plain",
        progress=progress_of([progress_row(at, at * 10) for at in range(180)]),
    )
    found = compare([plain, restarted])
    assert row(found, "step_time").other == pytest.approx(100.0)
    assert row(found, "power").outcome is Outcome.NONE_SHOWN


def test_too_few_readings_have_no_interval_and_say_so() -> None:
    found = compare([run(gpu(seconds=5, memory=100.0)), run(gpu(seconds=5, memory=[90.0, 95.0]), name="b")])
    memory = row(found, "memory")
    assert memory.outcome is Outcome.TOO_FEW
    assert "too few readings to tell that from chance" in sentence(memory, "B")


@pytest.mark.parametrize(
    ("runs", "align", "said"),
    [
        (1, None, "compare 2 to 8 runs, not 1"),
        (9, None, "compare 2 to 8 runs, not 9"),
        (2, Align.STEP, "run reports no steps; compare by time: --align time"),
    ],
)
def test_what_cannot_be_compared_is_said(runs: int, align: Align | None, said: str) -> None:
    with pytest.raises(CompareError, match=said):
        compare([run(gpu(memory=1.0))] * runs, align)


def test_runs_without_a_common_figure_cannot_be_compared() -> None:
    with pytest.raises(CompareError, match="no figure in common"):
        compare([run(), run()])


CASES = [
    ("memory>+5%", False),
    ("memory<-5%", True),
    ("memory <= -7.0 %", True),
    ("memory<-100", True),
    ("memory<-1e3", False),
    ("power>0%", False),
    ("peak_memory<-5%", True),
]


@pytest.mark.parametrize(("text", "holds"), CASES)
def test_conditions(text: str, holds: bool) -> None:
    found = compare([recorded(1494.0, 1), recorded(1381.5, 2)])
    assert bool(broken(found, [parse_condition(text)])) is holds


@pytest.mark.parametrize(
    "text", ["", "memory", "memory>five", "memory>>5%", "memory>5%%", "memory>nan", "a" * 300 + ">1"]
)
def test_what_is_no_condition_is_said(text: str) -> None:
    with pytest.raises(CompareError, match="is not a condition"):
        parse_condition(text)


def test_a_condition_on_what_is_not_compared_never_passes_unseen() -> None:
    found = compare([recorded(1494.0, 1), recorded(1381.5, 2)])
    with pytest.raises(CompareError, match="lossy is not compared between these runs; there are: duration, energy"):
        broken(found, [parse_condition("lossy>0")])


def test_several_runs_are_each_compared_with_the_first() -> None:
    found = compare([recorded(1000.0, 1), recorded(1100.0, 2), recorded(900.0, 3)])
    assert row(found, "memory", "B").outcome is Outcome.HIGHER
    assert row(found, "memory", "C").outcome is Outcome.LOWER
