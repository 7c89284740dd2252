"""`env: {pass: [...]}`: the variables of an environment that a job file takes, and refusals."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from orchestrator.spec.fields import looks_secret
from orchestrator.spec.job import change_spec, from_dict, parse_job, parse_jobs, passed_variables
from orchestrator.spec.model import MAX_PATTERNS
from orchestrator.spec.problems import SpecError
from orchestrator.spec.reader.document import LONGEST_VALUE, MAX_VARIABLES
from orchestrator.spec.reader.reading import job_schema, to_dict

HEAD = "name: digits\nentrypoint: python train.py\n"
HERE = {
    "HF_HOME": "/data/hf",
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": "k",
    "CUDA_VISIBLE_DEVICES": "3",
    "CUDA_CACHE_PATH": "/c",
    "OTHER": "x",
    "BASH_FUNC_x%%": "() { :; }",
}


def env_of(line: str, environ: dict[str, str] = HERE) -> dict[str, str]:
    return dict(parse_job(HEAD + line, environ=environ).env)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("env: {pass: [HF_HOME]}", {"HF_HOME": "/data/hf"}),
        ("env: {pass: ['WANDB_*']}", {"WANDB_MODE": "offline"}),
        ("env: {pass: ['*_HOME', OTHER], A: 1}", {"A": "1", "HF_HOME": "/data/hf", "OTHER": "x"}),
        ("env: {pass: [HF_HOME], HF_HOME: /own}", {"HF_HOME": "/own"}),
        ("env: {pass: ['CUDA_*']}", {"CUDA_CACHE_PATH": "/c"}),
        ("env: {pass: ['HF_*']}\nsecrets: [HF_HOME]", {}),
        ("env: {pass: [MISSING]}", {}),
        ("env: {pass: []}", {}),
        ("env: {pass: word}", {"pass": "word"}),
        ("env: {pass: ['BASH_*']}", {}),
    ],
)
def test_names_and_patterns_take_what_is_there(line: str, env: dict[str, str]) -> None:
    assert env_of(line) == env


def test_without_an_environment_nothing_is_taken() -> None:
    assert parse_job(HEAD + "env: {pass: [HF_HOME], A: 1}").env == {"A": "1"}


@pytest.mark.parametrize(
    ("item", "message", "hint"),
    [
        ("'*'", '"*" matches every variable', "HF_*"),
        ("'*_*'", "matches every variable", "HF_*"),
        ("1A", '"1A" is not a name or pattern of variables', "underscores"),
        ("'A=B'", '"A=B" is not', "underscores"),
        ("'${matrix.x}'", "is not a name", "underscores"),
        ("''", "empty text", ""),
        ("[A]", "got a list", ""),
        ("true", "got the YAML boolean true", ""),
        ("A" * 256, "of 256 characters", "at most 255"),
        ("HF_TOKEN", "looks like a secret", "write secrets: [HF_TOKEN]"),
        ("'*_KEY'", "looks like a secret", "takes names"),
        ("db_password", "looks like a secret", "write secrets: [db_password]"),
        ("RANK", "orch sets this variable itself", "remove it"),
    ],
)
def test_a_wrong_item_is_named_by_its_place(item: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(f"{HEAD}env:\n  pass:\n    - HF_HOME\n    - {item}\n", environ=HERE)
    (problem,) = caught.value.problems
    assert (problem.path, problem.line, problem.column) == ("env.pass[1]", 6, 7)
    assert message in problem.message
    assert hint in problem.hint


def test_too_many_patterns_and_the_same_twice_are_errors() -> None:
    listed = ", ".join(f"A{number}" for number in range(MAX_PATTERNS + 1))
    with pytest.raises(SpecError, match=f"a list of {MAX_PATTERNS + 1} items"):
        parse_job(f"{HEAD}env: {{pass: [{listed}]}}\n")
    with pytest.raises(SpecError, match="occurs twice"):
        parse_job(f"{HEAD}env: {{pass: [A, A]}}\n")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({f"A_{number}": "" for number in range(MAX_VARIABLES + 1)}, f"matches {MAX_VARIABLES + 1} variables"),
        ({"A_1": "x" * LONGEST_VALUE, "A_2": "x"}, f"have {LONGEST_VALUE + 1} characters"),
    ],
)
def test_too_much_is_an_error_at_the_list(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(HEAD + "env:\n  pass: ['A_*']\n", environ=environ)
    (problem,) = caught.value.problems
    assert message in problem.message
    assert (problem.path, problem.line, problem.column) == ("env.pass", 4, 9)
    with pytest.raises(SpecError, match="at most"):
        passed_variables(HEAD + "env: {pass: ['A_*']}", source="job.yaml", overrides=(), environ=environ)


def test_the_submitter_learns_what_stays_behind() -> None:
    environ = {**HERE, "WANDB_DIR": "\udcff", "WANDB_NOTES": "x" * (LONGEST_VALUE + 1)}
    text = HEAD + "env: {pass: ['WANDB_*']}"
    found = passed_variables(text, source="job.yaml", overrides=(), environ=environ)
    assert found.values == {"WANDB_MODE": "offline"}
    assert found.secret == ("WANDB_API_KEY",)
    assert found.unusable == ("WANDB_DIR", "WANDB_NOTES")
    text += "\nsecrets: [WANDB_API_KEY]"
    assert passed_variables(text, source="job.yaml", overrides=(), environ=environ).secret == ()


@pytest.mark.parametrize("text", ["", "name: [", "- a", HEAD + "env: {pass: ['*']}"])
def test_of_a_wrong_file_nothing_leaves_the_submitter(text: str) -> None:
    assert passed_variables(text, source="job.yaml", overrides=(), environ=HERE).values == {}


def test_overrides_have_their_say() -> None:
    overrides = ("env.pass=[HF_HOME]", "env.A=1")
    found = passed_variables(HEAD, source="job.yaml", overrides=overrides, environ=HERE)
    assert found.values == {"HF_HOME": "/data/hf"}
    assert parse_job(HEAD, overrides=overrides, environ=HERE).env == {"A": "1", "HF_HOME": "/data/hf"}


def test_every_job_of_a_matrix_has_them_and_their_values_are_no_templates() -> None:
    text = "name: digits-${matrix.x}\nentrypoint: python t.py\nenv: {pass: [A, B], X: '${matrix.x}'}\n"
    file = parse_jobs(text + "matrix: {parameters: {x: [1, 2]}}", environ={"A": "${matrix.x} ${matrix.none}"})
    assert [spec.env for _, spec in file.jobs] == [
        {"X": "1", "A": "${matrix.x} ${matrix.none}"},
        {"X": "2", "A": "${matrix.x} ${matrix.none}"},
    ]
    assert file.unset == ("B",)
    assert parse_jobs(HEAD + "env: {pass: [A]}", environ={"A": "${matrix.none}"}).jobs[0][1].env["A"]


def test_a_name_that_the_file_gives_itself_is_not_unset() -> None:
    file = parse_jobs(HEAD + "env: {pass: [A, 'B_*', C], A: 1}\nsecrets: [B_KEY]", environ={})
    assert file.unset == ("C",)


def test_what_is_stored_is_plain_variables_and_a_rerun_says_where_the_list_belongs() -> None:
    spec = parse_job(HEAD + "env: {pass: [HF_HOME]}", environ=HERE)
    assert from_dict(to_dict(spec)) == spec
    assert to_dict(spec)["env"] == {"HF_HOME": "/data/hf"}
    with pytest.raises(SpecError, match="is resolved when a file is submitted"):
        change_spec(spec, ["env.pass=[OTHER]"])


@pytest.mark.parametrize("name", ["HF_TOKEN", "KEY", "MY_TOKENS", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "x_key"])
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        ("env: {pass: [HF_HOME, 'WANDB_*'], A: 1}", True),
        ("env: {pass: word}", True),
        ("env: {pass: ['A=B']}", False),
        ("env: {pass: {A: 1}}", False),
        ("env: {OTHER: [A]}", False),
    ],
)
def test_the_schema_and_the_reader_agree(line: str, valid: bool) -> None:
    checker = jsonschema.Draft202012Validator(job_schema())
    assert checker.is_valid(yaml.safe_load(HEAD + line)) is valid
    if valid:
        parse_job(HEAD + line)
    else:
        with pytest.raises(SpecError):
            parse_job(HEAD + line)
