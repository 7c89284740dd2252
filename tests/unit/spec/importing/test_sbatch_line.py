"""A line of sbatch: its options, and the script that it submits."""

from __future__ import annotations

import pytest

from orchestrator.spec.importing import import_script, read_sbatch
from orchestrator.spec.problems import BadValueError


@pytest.mark.parametrize(
    ("line", "directive", "script", "arguments"),
    [
        ("sbatch x.sh", "#", "x.sh", ()),
        ("/usr/bin/sbatch -n 2 --gres gpu:4 x.sh a -b", "#SBATCH -n 2 --gres gpu:4", "x.sh", ("a", "-b")),
        (
            "sbatch -n2 --hold --exclusive --time=1:00:00 x.sh",
            "#SBATCH -n2 --hold --exclusive --time=1:00:00",
            "x.sh",
            (),
        ),
        ("sbatch -W -J 'my job' x.sh", "#SBATCH -W -J 'my job'", "x.sh", ()),
    ],
)
def test_options_end_at_the_script(line: str, directive: str, script: str, arguments: tuple[str, ...]) -> None:
    found = read_sbatch(line)
    assert found is not None
    assert (found.directive, found.script, found.arguments) == (directive, script, arguments)


@pytest.mark.parametrize("wrap", ["--wrap 'srun python train.py'", "--wrap='srun python train.py'"])
def test_a_wrapped_command_is_a_script_of_one_line(wrap: str) -> None:
    found = read_sbatch(f"sbatch -n 2 --gpus-per-task=1 {wrap}")
    assert found is not None
    job = import_script(found.command, found).job
    assert job["entrypoint"] == "python train.py"
    assert job["resources"] == {"num_workers": 2, "resources_per_worker": {"gpu": 1}}


def test_options_of_the_line_go_before_those_of_the_script() -> None:
    found = read_sbatch("sbatch --ntasks=8 x.sh")
    assert found is not None
    job = import_script("#!/bin/bash\n#SBATCH -n 2\nsrun python train.py\n", found).job
    assert job["resources"]["num_workers"] == 8


def test_arguments_of_the_line_are_those_of_the_script() -> None:
    found = read_sbatch("sbatch x.sh --lr 'a b'")
    job = import_script('python train.py --config ${3:-c.yaml} $# "$@" $2\n', found).job
    assert job["entrypoint"] == "python train.py --config c.yaml 2 --lr 'a b' a b"


@pytest.mark.parametrize("line", ["torchrun train.py", "python sbatch", "", "sbatch 'x"])
def test_other_lines_are_none(line: str) -> None:
    assert read_sbatch(line) is None


@pytest.mark.parametrize(("line", "said"), [("sbatch -n 2", "names no script"), ("sbatch --time", "has no value")])
def test_a_line_that_submits_nothing(line: str, said: str) -> None:
    with pytest.raises(BadValueError, match=said):
        read_sbatch(line)
