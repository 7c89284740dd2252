"""Checks of a submission's trackers: packages of the daemon's interpreter, and variables."""

from __future__ import annotations

import sys

import pytest
from msgspec.structs import replace

from orchestrator.analysis.trackers.names import TRACKERS, TrackerPackage, settings_of
from orchestrator.api.errors import InvalidSpecError
from orchestrator.api.requests import SubmitRequest
from orchestrator.daemon.submitting.submission import MAX_KNOWN_CHARACTERS, check, check_trackers
from orchestrator.spec.job import parse_job
from orchestrator.spec.model import JobSpec

HEAD = "name: digits\nentrypoint: python train.py\n"
HERE = {name: TrackerPackage(name=name, packages={"json": name}) for name in TRACKERS}
LACKING = HERE | {
    "mlflow": TrackerPackage(name="mlflow", packages={"no_such_module_a": "a-b", "no_such_module_b": "c"})
}


def request() -> SubmitRequest:
    return SubmitRequest(yaml=HEAD, source="job.yaml", idempotency_key="k", cwd="/", path="/bin")


def test_a_package_that_is_missing_is_one_error_with_the_line_to_type() -> None:
    spec = parse_job(HEAD + "trackers: [wandb, mlflow]\n")
    check_trackers(request(), spec, HERE)
    with pytest.raises(InvalidSpecError) as caught:
        check_trackers(request(), spec, LACKING)
    (problem,) = caught.value.problems
    assert (problem.path, problem.source) == ("trackers", "job.yaml")
    assert problem.message == f"mlflow cannot be imported by the daemon's {sys.executable}"
    assert problem.hint == f"{sys.executable} -m pip install a-b c; then submit again"


@pytest.mark.parametrize("given", ["env: {TRACKIO_SPACE_ID: me/board}", "secrets: [TRACKIO_SERVER_URL]"])
def test_a_setting_of_trackio_without_effect_is_an_error(given: str) -> None:
    spec = parse_job(f"{HEAD}{given}\ntrackers: [trackio]\n")
    with pytest.raises(InvalidSpecError) as caught:
        check_trackers(request(), spec, HERE)
    assert "has no effect" in caught.value.problems[0].message
    check_trackers(request(), parse_job(f"{HEAD}{given}\ntrackers: [wandb]\n"), HERE)


def test_a_tracker_gets_its_own_variables_and_those_of_the_network() -> None:
    given = {"WANDB_API_KEY": "k", "MLFLOW_TRACKING_URI": "u", "HTTPS_PROXY": "p", "LD_PRELOAD": "x", "PYTHONPATH": "y"}
    assert settings_of("wandb", given) == {"WANDB_API_KEY": "k", "HTTPS_PROXY": "p"}
    assert settings_of("mlflow", given) == {"MLFLOW_TRACKING_URI": "u", "HTTPS_PROXY": "p"}
    assert settings_of("tensorboard", given) == {"HTTPS_PROXY": "p"}


def checked(env: str, passed: dict[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    text = f"name: digits\nentrypoint: /bin/true\nworking_dir: null\nenv: {env}\n"
    (found,) = check(replace(request(), yaml=text, passed=passed))
    return dict(found.spec.env), found.notes


def test_what_a_client_passes_counts_only_as_far_as_the_file_asks_for_it() -> None:
    given = {"HF_HOME": "/hf", "LD_PRELOAD": "x.so", "HF_TOKEN": "t", "A": "theirs"}
    env, notes = checked("{pass: ['HF_*', A, 'WANDB_*'], A: own}", given)
    assert env == {"A": "own", "HF_HOME": "/hf"}
    assert notes == ("env.pass: no variable of the submitter's environment is passed for WANDB_*",)


def spec_of(text: str, **fields: object) -> JobSpec:
    (found,) = check(replace(request(), yaml=text, **fields))  # type: ignore[arg-type]  # fields of the request
    return found.spec


def test_a_file_that_is_submitted_again_has_the_spec_of_the_first_time() -> None:
    text = "name: again\nentrypoint: /bin/true\nworking_dir: null\nenv: {pass: [LR]}\n"
    first = spec_of(text, passed={"LR": "0.1"})
    assert spec_of(text, passed={"LR": "0.1"}, idempotency_key="another") is first
    assert spec_of(text, passed={"LR": "0.2"}).env == {"LR": "0.2"}
    assert spec_of(text, overrides=("priority=7",)).priority == 7
    large = f"{text}# {'x' * MAX_KNOWN_CHARACTERS}\n"
    assert spec_of(large) == spec_of(large)
    assert spec_of(large) is not spec_of(large), "what is large is not kept"


def test_the_errors_of_a_file_are_told_each_time() -> None:
    for _ in range(2):
        with pytest.raises(InvalidSpecError, match="one error"):
            spec_of("name: again\nentrypoint: /bin/true\nworking_dir: null\npriority: 101\n")
