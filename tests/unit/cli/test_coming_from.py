"""docs/coming-from.md: each command of orch that it shows runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
STATES = {"wait": "SUCCEEDED", "logs": "SUCCEEDED", "rerun": "SUCCEEDED", "resume": "SUSPENDED", "explain": "PENDING"}


def test_there_are_twenty_tasks_and_no_gap_in_our_column() -> None:
    assert len(COMMANDS) == 20
    assert len(set(COMMANDS)) == 20
    assert all(line.count(" | ") == 6 for line in TASKS)


@pytest.mark.parametrize("line", [*COMMANDS, *INTRODUCED])
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
    done = orch(*words)
    assert done.code == 0, done.err
    assert done.out or words[0] in {"cancel", "wait"}
