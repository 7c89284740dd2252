"""Many jobs from one file: the combinations, the places for values, and that a value stays one word."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.fields import SCIENTIFIC
from orchestrator.spec.job import parse_jobs
from orchestrator.spec.matrix import unit_name
from orchestrator.spec.model import MAX_MATRIX_JOBS
from orchestrator.spec.problems import SpecError

HEAD = "name: digits-${matrix.lr}\nentrypoint: python train.py --lr ${matrix.lr} --opt=${matrix.opt}\n"


def values_of(text: str, **given_: Any) -> list[dict[str, Any]]:
    return [dict(c.values) for c, _ in parse_jobs(text, **given_).jobs if c is not None]


def problems_of(text: str) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_jobs(text)
    return [(problem.path, f"{problem.message} ({problem.hint})") for problem in caught.value.problems]


def test_a_job_for_each_combination_without_the_excluded_ones_and_with_the_included_ones() -> None:
    text = HEAD + (
        "matrix: {parameters: {lr: [0.1, 0.01], opt: [adam, sgd]}, exclude: [{lr: 0.1, opt: sgd}],"
        " include: [{lr: 1, opt: lion}], max_concurrent: 2}\n"
    )
    found = parse_jobs(text)
    assert (found.name, found.matrix.max_concurrent if found.matrix else None) == ("digits", 2)
    assert values_of(text) == [
        {"lr": 0.1, "opt": "adam"},
        {"lr": 0.01, "opt": "adam"},
        {"lr": 0.01, "opt": "sgd"},
        {"lr": 1, "opt": "lion"},
    ]
    assert [spec.name for _, spec in found.jobs] == ["digits-0-1", "digits-0-01", "digits-0-01", "digits-1"]
    assert found.jobs[0][1].entrypoint == "python train.py --lr 0.1 --opt=adam"
    assert all(spec.matrix is None for _, spec in found.jobs)


def test_set_changes_the_whole_matrix() -> None:
    text = HEAD + "env: {STEPS: '5000'}\nmatrix: {parameters: {lr: [0.1, 0.01], opt: [adam, sgd]}}\n"
    found = parse_jobs(text, overrides=["env.STEPS=500", "matrix.parameters.lr=[3]"])
    assert [(spec.env["STEPS"], spec.name) for _, spec in found.jobs] == [("500", "digits-3")] * 2


def test_a_value_keeps_its_type_where_it_is_all_of_a_key() -> None:
    text = (
        "name: a\nentrypoint: python t.py\nresources: {num_workers: '${matrix.n}'}\npreemptible: ${matrix.yes}\n"
        "env: {N: '${matrix.n}', TEXT: 'n is ${matrix.n}, ${matrix.yes}'}\nmatrix: {parameters: {n: [1, 2], yes: [false]}}\n"
    )
    specs = [spec for _, spec in parse_jobs(text).jobs]
    assert [spec.resources.num_workers for spec in specs] == [1, 2]
    assert not specs[0].preemptible
    assert specs[1].env == {"N": "2", "TEXT": "n is 2, false"}


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable() and not SCIENTIFIC.fullmatch(text)))
def test_a_value_is_never_a_further_argument_nor_shell(value: str) -> None:
    text = yaml.safe_dump(
        {
            "name": "a",
            "entrypoint": "python train.py --opt ${matrix.opt} 'a ${matrix.opt} b' last",
            "matrix": {"parameters": {"opt": [value]}},
        }
    )
    entry = parse_entrypoint(parse_jobs(text).jobs[0][1].entrypoint)
    assert entry.argv == ("python", "train.py", "--opt", value, f"a {value} b", "last")
    assert entry.target == "train.py"


@pytest.mark.parametrize(
    "command",
    [
        'bash -c "echo ${matrix.lr}"',
        "bash -lc 'run ${matrix.lr}'",
        "/usr/bin/python3 -c 'f(${matrix.lr})'",
        "perl -e '${matrix.lr}'",
    ],
)
def test_a_value_does_not_become_code(command: str) -> None:
    text = yaml.safe_dump({"name": "a", "entrypoint": command, "matrix": {"parameters": {"lr": [1]}}})
    ((path, message),) = problems_of(text)
    assert path == "entrypoint"
    assert "would become code of" in message
    assert "put it into env" in message


def test_the_word_after_another_option_c_is_no_code() -> None:
    text = yaml.safe_dump({"name": "a", "entrypoint": "train -c ${matrix.c}", "matrix": {"parameters": {"c": ["x y"]}}})
    assert shlex.split(parse_jobs(text).jobs[0][1].entrypoint) == ["train", "-c", "x y"]


def test_shell_syntax_of_the_file_itself_is_refused_as_ever() -> None:
    text = "name: a\nentrypoint: python a.py ${matrix.lr} && rm b\nmatrix: {parameters: {lr: [1]}}\n"
    ((path, message),) = problems_of(text)
    assert path == "entrypoint"
    assert "no shell reads this line" in message


@pytest.mark.parametrize(
    ("matrix", "path", "words"),
    [
        ("{}", "matrix", "without parameters"),
        ("{parameters: {lr: []}}", "matrix.parameters.lr", "no values"),
        ("{parameters: {lr: [1, 1.0]}}", "matrix.parameters.lr[1]", "1.0 occurs twice"),
        ("{parameters: {lr: [1]}, exclude: [{x: 1}]}", "matrix.exclude[0]", "which is not a parameter"),
        ("{parameters: {lr: [1]}, exclude: [{lr: 2}]}", "matrix.exclude[0]", "lr is never 2 (its values are 1)"),
        ("{parameters: {lr: [1]}, exclude: [{lr: true}]}", "matrix.exclude[0]", "lr is never true"),
        ("{parameters: {lr: [1]}, exclude: [{lr: 1}]}", "matrix.exclude", "no combination is left"),
        ("{parameters: {lr: [1]}, exclude: [{}]}", "matrix.exclude[0]", "excludes every combination"),
        ("{parameters: {lr: [1]}, include: [{lr: 1}]}", "matrix.include[0]", "is there already"),
        ("{parameters: {lr: [1]}, include: [{lr: 2, b: 3}]}", "matrix.include[0]", '"b" is not a parameter'),
        ("{parameters: {lr: [1], b: [1]}, include: [{lr: 2}]}", "matrix.include[0]", "has no value for b"),
        ("{parameters: {lr: [1]}, strategy: random}", "matrix.strategy", "one of grid"),
        (f"{{parameters: {{lr: {list(range(MAX_MATRIX_JOBS))}}}, include: [{{lr: -1}}]}}", "matrix.parameters", "1001 combinations, more than 1000"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_matrix(matrix: str, path: str, words: str) -> None:
    found = problems_of(f"name: a\nentrypoint: python t.py ${{matrix.lr}}\nmatrix: {matrix}\n")
    assert any(where == path and words in message for where, message in found), found


def test_what_is_wrong_with_placeholders() -> None:
    text = (
        "name: a\nentrypoint: python t.py ${matrix.lrr}\nworking_dir: ${matrix.lr}\n"
        "matrix: {parameters: {lr: [1], unused: [1]}}\n"
    )
    assert problems_of(text) == [
        ("entrypoint", '"lrr" is not a parameter of the matrix (did you mean ${matrix.lr}?)'),
        ("working_dir", "working_dir is the same for all jobs of a matrix (use it in entrypoint, env, name, or another key)"),
        ("matrix", "unused is used nowhere, so it would change nothing (write ${matrix.unused} in entrypoint, env, name or another key)"),
    ]  # fmt: skip


def test_an_error_that_several_combinations_have_is_told_once() -> None:
    text = "name: a\nentrypoint: python t.py ${matrix.n}\npriority: 200\nresources: {num_workers: '${matrix.n}'}\n"
    found = problems_of(text + "matrix: {parameters: {n: [1, x, y]}}\n")
    assert [path for path, _ in found] == ["priority", "resources.num_workers", "resources.num_workers"]


def test_a_placeholder_without_a_matrix_is_an_error() -> None:
    ((path, message),) = problems_of("name: a\nentrypoint: python t.py\nenv: {A: '${matrix.lr}'}\n")
    assert (path, message) == ("env.A", '"lr" is not a parameter of the matrix (parameters: none)')


@pytest.mark.parametrize(
    ("template", "name"),
    [("a-${matrix.lr}-b", "a-b"), ("a-${matrix.lr}", "a"), ("${matrix.lr}", "matrix"), ("a", "a")],
)
def test_the_matrix_has_the_name_without_the_values(template: str, name: str) -> None:
    assert unit_name(template) == name
