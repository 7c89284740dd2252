"""The wheel without extras: a client that needs neither torch nor Ray, and names the part that a command lacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from orchestrator import parts
from orchestrator.api.server.testing import ServedFake, serve_fake
from orchestrator.cli.app import ENTRIES
from tests.support import light_client
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
JOB = "name: digits\nentrypoint: python train.py\n"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("light")
    return light_client.install(light_client.build_wheel(directory), directory / "venv")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedFake]:
    with serve_fake(tmp_path / "home" / "run", owner_uid=os.getuid()) as fake:
        yield fake


def _orch(program: Path, cwd: Path, *arguments: str, address: str = "") -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ORCH_", "RAY_", "PYTHON"))}
    return subprocess.run(
        [str(program), *arguments],
        env={**environ, "ORCH_HOME": str(cwd / "home"), **({"ORCH_ADDRESS": address} if address else {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_it_brings_neither_torch_nor_ray(program: Path) -> None:
    (site,) = (program.parents[1] / "lib").glob("python*/site-packages")
    brought = light_client.needed(light_client.requirements_of(site))
    assert brought.isdisjoint({"torch", "ray", "numpy", "fastapi", "grpcio", "scikit-learn"})
    assert {"typer", "pydantic"} <= brought
    for module in ("torch", "ray", "numpy"):
        assert not (site / module).exists()


def test_every_command_has_its_help(program: Path, tmp_path: Path) -> None:
    done = _orch(program, tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert [entry.name for entry in ENTRIES if f" {entry.name} " not in done.stdout] == []


@pytest.mark.usefixtures("served")
def test_a_job_is_submitted_and_looked_at(program: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = _orch(program, tmp_path, "submit", "job.yaml", "--json")
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["job_id"]
    for line in (
        ("status",),
        ("status", job_id, "--json"),
        ("show", job_id),
        ("events", job_id),
        ("explain", job_id),
        ("queue",),
        ("nodes",),
        ("checkpoints", job_id),
        ("logs", job_id),
        ("pause", job_id),
        ("resume", job_id),
        ("cancel", job_id),
        ("submit", "job.yaml", "--dry-run"),
        ("run", "--", "python", "train.py"),
        ("import", "torchrun train.py"),
        ("schema",),
        ("dashboards", "export", "boards"),
        ("doctor", "--json"),
    ):
        answer = _orch(program, tmp_path, *line)
        assert "Traceback" not in answer.stderr, (line, answer.stderr)
        expected = 5 if line[0] == "doctor" else 0  # no Ray here
        assert answer.returncode == expected, (line, answer.stdout, answer.stderr)


def test_a_client_is_never_told_to_start_a_daemon(program: Path, tmp_path: Path) -> None:
    for line in (("status",), ("logs", "digits"), ("doctor",), ("report", "digits"), ("restore", "nothing"), ("down",)):
        done = _orch(program, tmp_path, *line)
        assert "orch up" not in done.stdout + done.stderr, line
    alone = _orch(program, tmp_path, "status")
    assert alone.returncode == 4
    assert "next: `orch login http://HOST:PORT`" in alone.stderr
    assert "client" in _orch(program, tmp_path, "doctor").stdout
    elsewhere = _orch(program, tmp_path, "status", address="http://127.0.0.1:1")
    assert "`orch login` shows and changes the address" in elsewhere.stderr
    assert "orch up" not in elsewhere.stderr


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("up", "daemon"),
        ("serve", "daemon"),
        ("demo", "daemon"),
        ("submit job.yaml", "daemon"),
        ("bench", "train"),
        ("advise", "train"),
        ("top", "top"),
        ("compare a b", "plots"),
    ],
)
def test_a_missing_part_is_one_error_with_the_line_to_type(program: Path, tmp_path: Path, line: str, part: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = _orch(program, tmp_path, *line.split())
    assert done.returncode == 5, done.stdout + done.stderr
    assert done.stdout == ""
    told, hint = done.stderr.splitlines()
    assert f"needs the part '{part}'" in told
    assert hint.strip().startswith("next: ")
    assert re.search(rf"'orchd\[{part}\] @ file:///\S+\.whl'", hint), "the wheel that it was installed from"
    assert str(program.parent / "python") in hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml"]


def test_the_table_of_parts_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == parts.DISTRIBUTION
    extras = project["optional-dependencies"]
    named = packages_distributions()
    assert set(_packages(extras, "stacks")) == {"py-spy"}
    for part, modules in parts.PARTS.items():
        if part == "stacks":
            continue
        wanted = {name.lower().replace("-", "_") for name in _packages(extras, part)}
        brought = {_plain(named[module]) for module in modules if module in named}
        assert brought <= wanted, part
        assert len(modules) == len(wanted), part
    assert set(parts.PARTS) <= set(Requirement(extras["all"][0]).extras) | {"train"}


def _plain(names: list[str]) -> str:
    """Return the distribution of a module; mlflow-skinny provides mlflow's, and the whole mlflow is accepted too."""
    name = "mlflow-skinny" if "mlflow-skinny" in names else names[0]
    return name.lower().replace("-", "_")


def _packages(extras: dict[str, list[str]], part: str) -> Iterator[str]:
    for text in extras[part]:
        requirement = Requirement(text)
        if requirement.name == parts.DISTRIBUTION:
            for other in requirement.extras:
                yield from _packages(extras, other)
        else:
            yield requirement.name
