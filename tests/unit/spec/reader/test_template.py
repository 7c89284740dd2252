"""`orch init`: the file that it writes is a valid job, also with every commented line enabled."""

import re

import pytest

from orchestrator.spec.entrypoint import EntrypointError
from orchestrator.spec.job import parse_job
from orchestrator.spec.model import JobSpec
from orchestrator.spec.reader.template import init_text


def test_the_template_is_the_smallest_job_for_the_script() -> None:
    assert parse_job(init_text("train.py")) == JobSpec(name="train", entrypoint="python train.py")


def test_every_commented_key_can_be_switched_on() -> None:
    text = re.sub(r"(?m)^( *)#(?! \S)", r"\1", init_text("train.py"))
    spec = parse_job(text)
    assert spec.checkpoint.score_attribute == "loss"
    assert spec.labels == {"team": "vision"}
    assert spec.retry.log_policies


@pytest.mark.parametrize(
    ("script", "python", "name", "entrypoint"),
    [
        ("src/Train_v2.py", "python", "train-v2", "python src/Train_v2.py"),
        ("my train.py", "/opt/x/bin/python3.11", "my-train", "/opt/x/bin/python3.11 'my train.py'"),
        ("2024.py", "python", "job-2024", "python 2024.py"),
        ("on.py", "python", "job-on", "python on.py"),
        ("---.py", "python", "job", "python ./---.py"),
        ("ü.py", "python", "job", "python 'ü.py'"),
        ("a: b #c.py", "python", "a-b-c", "python 'a: b #c.py'"),
        ("run.sh", "python", "run", "bash run.sh"),
        ("bin/train", "python", "train", "bin/train"),
        ("train", "python", "train", "python train"),
        ("x" * 80 + ".py", "python", "x" * 50, "python " + "x" * 80 + ".py"),
    ],
)
def test_names_and_entry_points_follow_the_script(script: str, python: str, name: str, entrypoint: str) -> None:
    spec = parse_job(init_text(script, python=python))
    assert (spec.name, spec.entrypoint) == (name, entrypoint)


def test_a_script_that_no_line_can_name_is_refused() -> None:
    with pytest.raises(EntrypointError):
        init_text("a\0b.py")
    with pytest.raises(EntrypointError, match="rename the script"):
        init_text("\\\n")
