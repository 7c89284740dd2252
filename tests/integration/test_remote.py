"""A job submitted from a laptop: the daemon is reached over TCP with a token alone; files are uploaded and fetched."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.ports import free_port
from tests.support.stack import ORCH, PATIENCE_SECONDS, Stack, process_gone, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKEN = "a-token-of-forty-characters-for-the-daemon"
TRAIN = """
import os, pathlib
print("data is", pathlib.Path("data/part.txt").read_text(), flush=True)
pathlib.Path("out").mkdir(exist_ok=True)
pathlib.Path("out/model.pt").write_bytes(b"weights" * 1000)
"""
SPEC = {
    "version": 1,
    "name": "remote",
    "entrypoint": "python train.py",
    "outputs": ["out/**"],
    "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
}


@pytest.fixture
def remote(breakable: Stack, tmp_path: Path) -> Iterator[str]:
    """Yield the address of the session's daemon, started again with control over TCP; its Ray stays."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    stop(breakable)
    address = f"127.0.0.1:{free_port()}"
    listening = Stack(home=breakable.home, extra=("--listen", address, "--token-file", str(tmp_path / "token")))
    listening.up()
    yield address
    stop(listening)
    Stack.in_use.remove(listening)
    breakable.up()


def stop(stack: Stack) -> None:
    pid = stack.daemon_pid()
    stack.client.shutdown()
    wait_until("the daemon has stopped", lambda: process_gone(pid))


@pytest.fixture
def laptop(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return orch's command line for a user with another home, in a directory that the daemon cannot reach."""
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir(mode=0o700)
    (project / "data").mkdir(parents=True)
    (project / "data/part.txt").write_text("of this laptop")
    (project / "train.py").write_text(TRAIN)
    (project / "job.yaml").write_text(json.dumps(SPEC))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ORCH_", "RAY_"))}

    def run(*arguments: str, said: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*ORCH, *arguments],
            env={**environ, "ORCH_HOME": str(home), **more},
            cwd=project,
            input=said,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    return run


def test_a_job_is_submitted_followed_and_fetched_over_tcp(
    remote: str, laptop: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    refused = laptop("login", f"http://{remote}", said="not-the-token\n")
    assert refused.returncode != 0
    assert "token" in refused.stderr
    login = laptop("login", f"http://{remote}", said=f"{TOKEN}\n")
    assert login.returncode == 0, login.stderr
    submitted = laptop("submit", "job.yaml", "--wait")
    assert submitted.returncode == 0, submitted.stderr
    assert "uploaded working_dir: 3 files" in submitted.stderr
    job_id = submitted.stdout.split()[0]
    assert laptop("logs", job_id, "--raw").stdout.strip().endswith("data is of this laptop")
    again = laptop("submit", "job.yaml", "--wait")
    assert again.returncode == 0, again.stderr
    assert "the rest was there" in again.stderr, "pieces that the daemon has are not sent twice"
    got = laptop("get", job_id, "outputs/**")
    assert got.returncode == 0, got.stderr
    (model,) = (tmp_path / "project").rglob("model.pt")
    assert model.read_bytes() == b"weights" * 1000
    assert laptop("status", job_id, "--json").returncode == 0
    assert laptop("login", "--forget").returncode == 0
    assert laptop("status").returncode == 4, "there is no daemon of this home"
