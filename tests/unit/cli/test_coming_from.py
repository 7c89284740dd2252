"""docs/coming-from.md: each command of orch that it shows runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.usage_views import UsageReport, UsageRow
from orchestrator.api.views import CheckpointView

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
TASKS = [line for line in PAGE.splitlines() if line.startswith("| ") and "`orch " in line.rpartition(" | ")[2]]
COMMANDS = [re.findall(r"`(orch [^`]*)`", line.rpartition(" | ")[2])[0] for line in TASKS]
INTRODUCED = re.findall(r"`(orch import [^`]+)`", PAGE.partition("\n|")[0])
SESSIONS = ("attach", "run -i", "exec", "port-forward", "get", "login")
STATES = {"wait": "SUCCEEDED", "logs": "SUCCEEDED", "rerun": "SUCCEEDED", "resume": "SUSPENDED", "explain": "PENDING"}


@pytest.mark.parametrize(
    "line",
    [line for line in (*COMMANDS, *INTRODUCED) if not line.startswith(tuple(f"orch {name}" for name in SESSIONS))],
)
def test_the_command_runs(
    orch: Orch, served: ServedFake, home: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    words = shlex.split(line)[1:]
    monkeypatch.chdir(home)
    (home / "job.yaml").write_text("name: digits\nentrypoint: python train.py\n")
    (home / "train.sbatch").write_text("#!/bin/bash\n#SBATCH -n 2\nsrun python train.py\n")
    state = STATES.get(words[0], "RUNNING")
    job = served.do(lambda service: service.add("digits", state=state, num_workers=2, attempt=1))
    served.do(lambda service: service.write(job.id, "step 1", rank=1))
    found = CheckpointView(step=1, at=1.0, path="/c/1")
    served.do(lambda service: service._checkpoints.setdefault(job.id, []).append(found))
    nothing = UsageRow(keys={}, jobs=0, gpu_hours=0.0, waiting_gpu_hours=0.0)
    answer = UsageReport(since=0.0, until=9.0, by=("user",), rows=(), total=nothing)
    served.do(lambda service: setattr(service, "used", answer))
    done = orch(*words)
    assert done.code == 0, done.err
    assert done.out or words[0] in {"cancel", "wait"}
