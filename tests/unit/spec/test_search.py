"""The keys of a search in job.yaml: its first trials, later ones, and refusals."""

from __future__ import annotations

import pytest

from orchestrator.spec.job import parse_jobs, parse_trial
from orchestrator.spec.matrix import objectives_of, prunes
from orchestrator.spec.problems import SpecError

FILE = """
version: 1
name: net-${matrix.lr}
entrypoint: python train.py --lr ${matrix.lr} --layers ${matrix.layers} --opt ${matrix.opt}
matrix:
  strategy: optuna
  parameters: {opt: [adam, sgd]}
  ranges: {lr: {low: 1e-5, high: 0.1, log: true}, layers: {low: 1, high: 8}}
  trials: 20
  objectives: {loss: min}
"""


def changed(*overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_jobs(FILE, overrides=[f"matrix.{one}" for one in overrides])
    return [problem.message for problem in caught.value.problems]


def test_a_search_begins_in_the_middle_or_with_what_it_includes() -> None:
    file = parse_jobs(FILE)
    ((combination, spec),) = file.jobs
    assert combination is not None
    assert combination.values == {"opt": "adam", "lr": 0.001, "layers": 4}
    assert (file.name, spec.name, spec.matrix) == ("net", "net-0-001", None)
    assert spec.entrypoint == "python train.py --lr 0.001 --layers 4 --opt adam"
    included = parse_jobs(
        FILE, overrides=["matrix.include=[{lr: 0.1, layers: 1, opt: sgd}, {lr: 0.01, layers: 2, opt: adam}]"]
    )
    assert [c.values["lr"] for c, _ in included.jobs if c is not None] == [0.1, 0.01]


def test_a_later_trial_is_the_file_with_its_values() -> None:
    values = {"lr": 0.0125, "layers": 3, "opt": "sgd"}
    spec = parse_trial(FILE, values, overrides=["env.A=1"])
    assert (spec.name, spec.env["A"]) == ("net-0-0125", "1")
    assert spec.entrypoint == "python train.py --lr 0.0125 --layers 3 --opt sgd"


def test_values_that_no_first_trial_has_are_checked_too() -> None:
    text = FILE + 'resources: {num_workers: "${matrix.layers}"}\n'
    assert parse_jobs(text).jobs
    with pytest.raises(SpecError, match="num_workers"):
        parse_jobs(text, overrides=["matrix.ranges.layers.low=0"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trials=null"], "the search has no number of trials"),
        (["exclude=[{opt: sgd}]"], "exclude has no effect in a search"),
        (["ranges.lr.low=0.5"], "low is 0.5, high is 0.1"),
        (["ranges.lr.low=0.0"], "log needs bounds above 0, and low is 0.0"),
        (["ranges.lr.low=much"], '"much" is not a number'),
        (["parameters.lr=[1]"], "lr is in parameters too"),
        (["include=[{lr: 0.1, layers: 1}]"], "has no value for opt"),
        (["include=[{lr: 0.1, layers: 1.5, opt: sgd}]"], "layers is never 1.5"),
        (["include=[{lr: 0.1, layers: 1, opt: lamb}]"], "opt is never lamb"),
        (["include=[{lr: 0.1, layers: 1, opt: sgd}]", "trials=null"], "the search has no number of trials"),
        (["objectives={}"], "the search has no objective"),
        (["objectives.energy_joules=min", "pruner=median"], "trials with several objectives are not pruned"),
        (["objectives={seconds: min}", "pruner=median"], "only a reported metric can be pruned by"),
        (["pruner=none", "warmup_steps=5"], "warmup_steps has no effect with pruner: none"),
        (["strategy=grid"], "ranges has no effect with strategy: grid"),
        (["trials=1001"], "expected a whole number from 1 to 1000, got 1001"),
    ],
)
def test_what_a_search_cannot_be(overrides: list[str], message: str) -> None:
    assert message in changed(*overrides)


def test_objectives_are_the_score_of_checkpoints_unless_said_otherwise() -> None:
    file = parse_jobs(
        FILE.replace("  objectives: {loss: min}\n", "") + "checkpoint: {score_attribute: acc, score_order: max}\n"
    )
    assert file.matrix is not None
    sought = objectives_of(file.matrix, file.jobs[0][1].checkpoint)
    assert sought == {"acc": "max"}
    assert prunes(file.matrix, sought)
    assert not prunes(file.matrix, {"acc": "max", "seconds": "min"})
    assert not prunes(file.matrix, {"seconds": "min"})
