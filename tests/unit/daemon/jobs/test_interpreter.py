"""A submission reports that the job's interpreter lacks torch, if the script imports it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from orchestrator.daemon.submitting.submission import interpreter_of, torch_notes
from orchestrator.spec.job import parse_job
from orchestrator.spec.model import JobSpec

Asked = tuple[JobSpec, str, Path]


def python(directory: Path, *, code: int) -> str:
    """Write a program that stands for an interpreter and ends with this exit code; return its path."""
    path = directory / f"python{code}"
    path.write_text(f"#!/bin/sh\necho asked >> {directory}/asked\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def checked(directory: Path, interpreter: str, script: str, *, entrypoint: str = "python train.py --lr 1") -> Asked:
    (directory / "train.py").write_text(script)
    spec = parse_job(f"name: a\nentrypoint: {entrypoint}\n")
    return spec, interpreter, directory


def test_an_interpreter_without_torch_is_named_with_the_line_to_type(tmp_path: Path) -> None:
    lacks = python(tmp_path, code=3)
    (note,) = torch_notes(*checked(tmp_path, lacks, "import os\nimport torch\n"), "job.yaml")
    assert f"`{lacks} -m pip install torch`" in note
    assert f"orch submit job.yaml --set 'entrypoint={sys.executable} train.py --lr 1'`" in note
    (note,) = torch_notes(*checked(tmp_path, lacks, "import torch\n"), "<orch run>")
    assert note.endswith(f"`{sys.executable} train.py --lr 1`")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("from torch import nn\n", 1),
        ("def f():\n    import torch.distributed as dist\n", 1),
        ("import accelerate\n", 1),
        ("import numpy\n# import torch\n", 0),
        ("import torchaudio_lite\n", 0),
        ("", 0),
    ],
)
def test_only_where_the_script_imports_it(tmp_path: Path, script: str, told: int) -> None:
    assert len(torch_notes(*checked(tmp_path, python(tmp_path, code=3), script), "job.yaml")) == told


def test_nothing_is_said_where_it_is_there_or_cannot_be_told(tmp_path: Path) -> None:
    for code in (0, 1):
        assert torch_notes(*checked(tmp_path, python(tmp_path, code=code), "import torch\n"), "job.yaml") == ()
    assert torch_notes(*checked(tmp_path, str(tmp_path / "none"), "import torch\n"), "job.yaml") == ()
    assert torch_notes(*checked(tmp_path, sys.executable, "import torch\n"), "job.yaml") == ()
    shell = checked(tmp_path, python(tmp_path, code=3), "import torch\n", entrypoint="bash train.py")
    assert torch_notes(*shell, "job.yaml") == ()
    (tmp_path / "train.py").unlink()
    assert torch_notes(*shell, "job.yaml") == ()


def test_an_interpreter_with_torch_is_asked_once(tmp_path: Path) -> None:
    has = checked(tmp_path, python(tmp_path, code=0), "import torch\n")
    lacks = checked(tmp_path, python(tmp_path, code=3), "import torch\n")
    for _ in range(3):
        torch_notes(*has, "job.yaml")
    assert (tmp_path / "asked").read_text() == "asked\n"
    for _ in range(2):
        torch_notes(*lacks, "job.yaml")
    assert (tmp_path / "asked").read_text() == "asked\n" * 3, "it may be installed meanwhile"


def test_the_file_behind_a_version_managers_script(tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    assert interpreter_of(str(shim)) == sys.executable
    assert interpreter_of(python(tmp_path, code=3)) == str(tmp_path / "python3")
