"""Fixtures: a fake orch in ORCH_HOME, and the command line run against it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from orchestrator.api.server.testing import ServedFake, serve_fake
from orchestrator.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

JOB = "name: digits\nentrypoint: python train.py\n"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        import json

        return json.loads(self.out)

    @property
    def problem(self) -> Any:
        import json

        return json.loads(self.err)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ORCH_ADDRESS", "ORCH_TOKEN", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "_ORCH_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.setenv("TZ", "UTC")
    return tmp_path


@pytest.fixture
def served(home: Path) -> Iterator[ServedFake]:
    with serve_fake(home / "run", owner_uid=os.getuid()) as fake:
        yield fake


@pytest.fixture
def orch(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def job_file(home: Path) -> Path:
    path = home / "job.yaml"
    path.write_text(JOB)
    return path
