"""`--set key=value`: the values that it sets, its refusals, and its name in messages."""

from typing import Any

import pytest

from orchestrator.spec.job import parse_job
from orchestrator.spec.model import LogPolicy
from orchestrator.spec.problems import Problem, SpecError
from orchestrator.spec.reader.reading import to_dict

FILE = """\
name: digits
entrypoint: python train.py
env: {A: one}
retry:
  log_policies: [{pattern: x, action: fail}]
priority: 10
"""


def problems_of(*overrides: str, text: str = FILE) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        parse_job(text, overrides=overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("priority=70", "priority", 70),
        ("name=other", "name", "other"),
        ("resources.num_workers=4", "resources.num_workers", 4),
        ("resources.num_workers={min: 1, max: 3}", "resources.num_workers.min", 1),
        (
            "resources.resources_per_worker={gpu: 0, memory: 8GB}",
            "resources.resources_per_worker.memory",
            8_000_000_000,
        ),
        ("env.A=two", "env.A", "two"),
        ("env.B=true", "env.B", "true"),
        ("env.B=null", "env.B", "null"),
        ("env.B=", "env.B", ""),
        ("env.B=1e-3", "env.B", "1e-3"),
        ("env.B=x=y", "env.B", "x=y"),
        ("env.B=a: b: c", "env.B", "a: b: c"),
        ('env.B="quoted"', "env.B", "quoted"),
        ("env={C: three}", "env", {"C": "three"}),
        ("outputs=[a, b]", "outputs", ["a", "b"]),
        ("outputs.0=a", "outputs", ["a"]),
        ("retry.log_policies.0.action=restart", "retry.log_policies", [{"pattern": "x", "action": "restart"}]),
        (
            "retry.log_policies.1={pattern: y, action: restart}",
            "retry.log_policies",
            [{"pattern": "x", "action": "fail"}, {"pattern": "y", "action": "restart"}],
        ),
        (r"labels.team\.x=a", "labels", {"team.x": "a"}),
        ("entrypoint=python a.py --x 'b: c'", "entrypoint", "python a.py --x 'b: c'"),
        ("working_dir=null", "working_dir", None),
        ("max_duration=2h", "max_duration", "2h"),
        ("report=off", "report", False),
        ("trainer.batch_size=8", "trainer", {"batch_size": 8}),
        ("trainer={timeout: 90s}", "trainer", {"timeout": "1m30s"}),
    ],
)
def test_a_value_is_laid_over_the_file(override: str, path: str, value: Any) -> None:
    found: Any = to_dict(parse_job(FILE, overrides=[override]))
    for step in path.split("."):
        found = found[step]
    assert found == value


def test_the_rest_of_the_file_stays_as_it_is() -> None:
    spec = parse_job(FILE, overrides=["priority=11"])
    assert spec.env == {"A": "one"}
    assert spec.retry.log_policies == (LogPolicy(pattern="x", action="fail"),)


def test_later_ones_win_and_can_mend_a_broken_file() -> None:
    assert parse_job(FILE, overrides=["priority=1", "priority=2"]).priority == 2
    assert parse_job(FILE.replace("10", "high"), overrides=["priority=2"]).priority == 2


@pytest.mark.parametrize(
    ("override", "path", "message", "hint"),
    [
        ("priority", "", "there is no `=`", "--set resources.num_workers=4"),
        ("=4", "", "is not a key", "joined by dots"),
        ("a..b=4", "", "is not a key", "joined by dots"),
        (".".join(["a"] * 17) + "=4", "", "is not a key", "joined by dots"),
        ("priority.x=4", "", 'nothing can be set below "10"', "set the key itself"),
        ("retry.log_policies.x=4", "", "x is not a position in a list of 1", "count from 0"),
        ("retry.log_policies.2=4", "", "2 is not a position in a list of 1", "count from 0"),
        ("retry.log_policies." + "9" * 5000 + "=4", "", "is not a position", "count from 0"),
        ("env=[1", "", "not valid YAML", "a bracket is not closed"),
        ("env={A: !!str x}", "", "tags are not supported", "remove the tag"),
        ("env={A: no}", "env.A", "the YAML boolean no", 'write "no"'),
        ("workdir=x", "workdir", "no such key", "did you mean working_dir?"),
        ("priority=x", "priority", 'got "x"', ""),
        ("name=\udcff", "", "is not allowed in a job file", "UTF-8"),
        ("name=a\0b", "", "is not allowed in a job file", "remove it"),
    ],
)
def test_what_cannot_be_set_is_told_with_the_argument(override: str, path: str, message: str, hint: str) -> None:
    (problem,) = problems_of(override)
    assert problem.path == path
    assert message in problem.message
    assert hint in problem.hint
    assert problem.source.startswith("--set ")
    assert problem.line == 0
    assert str(problem).isprintable()


def test_a_rule_broken_by_an_override_points_at_the_override() -> None:
    (problem,) = problems_of("entrypoint=torchrun t.py")
    assert str(problem).startswith("--set entrypoint=torchrun t.py: entrypoint: orch starts the ranks itself")
