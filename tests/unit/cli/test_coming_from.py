"""docs/coming-from.md: each command of orch that it shows runs."""

from __future__ import annotations

import io
import os
import re
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.server.testing import serve_fake
from orchestrator.api.usage_views import UsageReport, UsageRow
from orchestrator.api.views import CheckpointView
from orchestrator.daemon.requests.files import LeftFiles
from orchestrator.runtime.pools import Pool

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


def test_there_are_thirty_one_tasks_and_no_gap_in_our_column() -> None:
    assert len(COMMANDS) == 31
    assert len(set(COMMANDS)) == 31
    assert all(line.count(" | ") == 6 for line in TASKS)


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


def shown(name: str) -> list[str]:
    """Return the arguments of the page's command of this name."""
    (line,) = [line for line in COMMANDS if line.split()[1] == name]
    return shlex.split(line)[1:]


def test_a_command_runs_beside_a_rank(orch: Orch, served: ServedFake) -> None:
    served.do(lambda service: service.add("digits", state="RUNNING"))
    words = shown("exec")
    done = orch(*words)
    assert done.code == 0, done.err
    ((_, (rank, request, _)),) = served.do(lambda service: [c for c in service.calls if c[0] == "session"])
    assert (rank, list(request.argv)) == (0, words[words.index("--") + 1 :])


def test_a_port_is_forwarded_until_the_job_has_ended(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add("digits", state="SUCCEEDED"))
    *words, port = shown("port-forward")
    done = orch(*words, f"0:{port}")  # another program may use that port here
    assert done.code == 0, done.err
    assert f"is port {port} of rank 0 of {job.id}" in done.out
    assert f"{job.id} is SUCCEEDED" in done.err


def test_files_come_here(orch: Orch, served: ServedFake, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    left = home / "left"
    left.mkdir()
    (left / "model.pt").write_bytes(b"weights")
    (left / "log.txt").write_text("fine")
    job = served.do(lambda service: service.add("digits", state="SUCCEEDED"))
    with closing(Pool("outputs", 1)) as pool:
        files = LeftFiles(job.id, {"outputs": left}, pool)
        served.do(lambda service: service.files_of.update({job.id: files}))
        done = orch(*shown("get"))
    assert done.code == 0, done.err
    assert [path.name for path in (home / job.id).rglob("*") if path.is_file()] == ["model.pt"]


def test_commands_go_to_a_daemon_on_another_machine(orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("t0ken\n"))
    with serve_fake(home / "elsewhere", owner_uid=os.getuid(), token="t0ken") as remote:
        port = remote.tcp_endpoint.port
        words = [re.sub(r"//HOST:\d+", f"//127.0.0.1:{port}", word) for word in shown("login")]
        done = orch(*words)
        assert done.code == 0, done.err
        job = remote.do(lambda service: service.add("digits"))
        assert job.id in orch("status").out
