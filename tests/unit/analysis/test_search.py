"""Suggestions and pruning by Optuna from reported trials, and the results that are read from the trials' records."""

from __future__ import annotations

import io
import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.analysis.search import (
    Range,
    Reader,
    Space,
    Trial,
    advise,
    answer,
    at_shared_steps,
    main,
    shared_steps,
)
from orchestrator.analysis.trials import best_trials
from tests.unit.analysis.runs import write_job

if TYPE_CHECKING:
    from pathlib import Path

SPACE = Space(
    name="net-abc234",
    objectives={"loss": "min"},
    parameters={"opt": ["adam", "sgd"]},
    ranges={"lr": Range(low=1e-5, high=0.1, log=True), "layers": Range(low=1, high=8)},
    prunes=True,
)
VALUES = {"opt": "adam", "lr": 0.001, "layers": 4}


def ended(number: int, loss: float, **values: Any) -> Trial:
    return Trial(
        number=number,
        state="complete",
        values={**VALUES, **values},
        objectives=(loss,),
        reported={step: loss + 1.0 / step for step in (1, 2, 3)},
    )


def test_suggestions_are_within_the_space_differ_and_are_the_same_again() -> None:
    first = advise(SPACE, [ended(0, 1.0)], 3).suggested
    for values in first:
        assert 1e-5 <= values["lr"] <= 0.1
        assert values["layers"] in range(1, 9)
        assert values["opt"] in ("adam", "sgd")
        assert values["lr"] == float(f"{values['lr']:.6g}")
    assert len({values["lr"] for values in first}) == 3
    assert advise(SPACE, [ended(0, 1.0)], 3).suggested == first
    assert advise(SPACE, [ended(0, 1.0), ended(1, 2.0)], 1).suggested[0] not in first


def test_later_suggestions_follow_what_was_good() -> None:
    trials = [ended(n, abs(math.log10(lr) + 3), lr=lr) for n, lr in enumerate([1e-5, 3e-5, 1e-4, 1e-2, 3e-2, 0.1] * 3)]
    trials += [ended(18 + n, 0.01 * n, lr=10 ** (-3 + 0.02 * n)) for n in range(4)]
    near = [values for values in advise(SPACE, trials, 5).suggested if 1e-4 < values["lr"] < 1e-2]
    assert len(near) >= 3


def test_a_running_trial_below_the_median_is_pruned_and_one_above_is_not() -> None:
    others = [ended(number, float(number)) for number in range(4)]
    bad = Trial(number=4, state="running", values=VALUES, reported={1: 9.0, 2: 8.0})
    good = Trial(number=5, state="running", values=VALUES, reported={1: 1.0, 2: 0.5})
    lost = Trial(number=6, state="running", values=VALUES, reported={1: math.nan})
    pruned = advise(SPACE, [*others, bad, good, lost], 0).pruned
    assert [(one.number, one.step, one.value) for one in pruned] == [(4, 2, 8.0), (6, 1, None)]
    assert advise(SPACE, [*others[:3], bad], 0).pruned == ()  # too few to compare with


def test_failed_pruned_and_silent_trials_and_several_objectives_are_taken() -> None:
    space = Space(name="net-abc234", objectives={"loss": "min", "acc": "max"}, ranges=SPACE.ranges)
    trials = [
        Trial(number=0, state="complete", values=VALUES, objectives=(1.0, 0.5)),
        Trial(number=1, state="complete", values=VALUES),
        Trial(number=2, state="failed", values=VALUES),
        Trial(number=3, state="pruned", values=VALUES),
        Trial(number=4, state="running", values=VALUES),
    ]
    assert len(advise(space, trials, 2).suggested) == 2


def test_the_best_are_those_that_no_other_trial_beats() -> None:
    given = {0: (1.0, 10.0), 1: (2.0, 5.0), 2: (2.0, 11.0), 3: (1.0, 10.0), 4: (3.0, 5.0)}
    assert best_trials(given, ("min", "min")) == (0, 3, 1)
    assert best_trials(given, ("max", "min")) == (4,)
    assert best_trials({3: (0.5,), 1: (0.5,), 2: (0.9,)}, ("min",)) == (1,)
    assert best_trials({}, ("min",)) == ()


def test_trials_are_compared_at_steps_that_all_of_them_share() -> None:
    assert shared_steps(14) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert len(shared_steps(10**6)) < 140
    assert at_shared_steps([2, 4], [1.0, 2.0]) == {2: 1.0, 3: 1.5, 4: 2.0}
    assert at_shared_steps([1, 3, 2, 3], [9.0, 9.0, 2.0, 3.0]) == {1: 9.0, 2: 2.0, 3: 3.0}
    assert math.isnan(at_shared_steps([1, 2], [1.0, math.nan])[2])
    assert at_shared_steps([], []) == {}
    assert at_shared_steps([2, 5], [1.0, 2.0], better="max") == {2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}
    assert at_shared_steps([2, 5], [1.0, 2.0], better="min") == {2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0}
    assert math.isnan(at_shared_steps([1, 3], [1.0, math.nan], better="min")[2])


def test_the_best_trial_is_not_pruned_because_its_reports_lie_further_apart(tmp_path: Path) -> None:
    """Losses are 2 / (step + 1) + rate: interpolated between steps 14 and 27, one exceeds the others' at step 26."""
    rates = [0.001, 0.0005, 0.0015, 0.0002, 0.0, 0.01]
    told = []
    for number, rate in enumerate(rates):
        complete = number < 4
        directory = tmp_path / str(number)
        directory.mkdir()
        steps = range(1, 41) if complete else (7, 14, 27)
        lines = [{"at": 1.0 + s, "attempt": 1, "step": s, "metrics": {"loss": rate + 2 / (s + 1)}} for s in steps]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        state = "complete" if complete else "running"
        told.append({"number": number, "state": state, "values": {"lr": rate}, "directory": str(directory)})
    space = Space(name="s", objectives={"loss": "min"}, ranges={"lr": Range(low=0.0, high=1.0)}, prunes=True)
    found = answer(Reader(space), {"trials": told, "want": 0})
    assert set(found["given"]) == {"0", "1", "2", "3"}
    (pruned,) = found["pruned"]
    assert (pruned["number"], pruned["step"]) == (5, 26)


def test_the_process_reads_what_jobs_recorded_and_answers_line_by_line(tmp_path: Path) -> None:
    write_job(tmp_path / "a", metrics=lambda second: {"loss": 1.0 / (second + 1)})
    write_job(tmp_path / "b", metrics=lambda second: {"other": 1.0})
    (tmp_path / "c").mkdir()
    space = {"name": "net-abc234", "objectives": {"loss": "min"}, "parameters": {}, "prunes": True, "warmup_steps": 0}
    space["ranges"] = {"lr": {"low": 0.1, "high": 1.0, "log": False}}
    told = [
        {"number": n, "state": state, "values": {"lr": 0.5}, "directory": str(tmp_path / name)}
        for n, (name, state) in enumerate([("a", "complete"), ("b", "complete"), ("c", "complete"), ("c", "running")])
    ]
    lines = [json.dumps(space), json.dumps({"trials": told, "want": 1}), json.dumps({"trials": told, "want": 0})]
    out = io.StringIO()
    assert main(io.StringIO("\n".join(lines) + "\n"), out) == 0
    first, second = map(json.loads, out.getvalue().splitlines())
    (loss,) = first["given"]["0"]
    assert loss == pytest.approx(0.0, abs=0.2)
    assert first["missing"] == {"1": "loss was not reported", "2": "it has recorded nothing"}
    assert len(first["suggested"]) == 1
    assert second == {**first, "suggested": []}
