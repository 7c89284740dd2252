"""The files and sockets of a running daemon, its Ray and a job, as other users of the machine see them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.nodes.directories import namespace, page_directory
from tests.support.processes import own_umask
from tests.support.stack import PATIENCE_SECONDS, Stack, wait_until
from tests.support.users import OTHER, as_root, as_user

SCRIPT = """
import os, time
open("made", "w").close()
os.mkdir("folder")
open("pid", "w").write(str(os.getpid()))
time.sleep(600)
"""


def below(*directories: Path) -> Iterator[Path]:
    for directory in directories:
        yield directory
        yield from directory.rglob("*")


def is_of_a_rank(path: Path, home: Path) -> bool:
    """Return whether a rank may have made the file: ranks choose their files' modes, and the home keeps others out."""
    parts = path.relative_to(home).parts if path.is_relative_to(home) else ()
    return len(parts) > 3 and parts[0] == "jobs" and parts[2] in {"work", "outputs", "checkpoints", "resume"}


def umask_of(pid: int) -> int:
    (line,) = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("Umask:")]
    return int(line.split()[1], 8)


def test_all_that_orch_and_ray_keep_is_closed_and_ranks_have_their_own_umask(stack: Stack, tmp_path: Path) -> None:
    spec = {
        "version": 1,
        "name": "private",
        "entrypoint": "python train.py",
        "resources": {"num_workers": 1, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
        "stop_duration": "1s",
    }
    job_id = stack.submit(json.dumps(spec), tmp_path, train=SCRIPT)
    work = stack.settings.paths.work(job_id)
    wait_until("it has written", lambda: (work / "pid").exists() and (work / "pid").read_text() != "")
    pages = page_directory(namespace(stack.home))
    assert list(pages.iterdir())
    seen = [path for path in below(stack.home, stack.node_root, pages) if not is_of_a_rank(path, stack.home)]
    assert any("session_" in path.name for path in seen), "Ray's session is among them"
    # Ray opens its session to every user when a worker starts; the directory that it lies in is closed.
    session = (stack.settings.paths.ray / "s", stack.node_root / "ray")
    kept = [p for p in seen if not p.is_symlink() and not p.is_socket() and not any(map(p.is_relative_to, session))]
    assert stack.settings.paths.ray in kept
    assert [path for path in kept if mode_of(path) & 0o077] == []

    rank = psutil.Process(int((work / "pid").read_text()))
    assert umask_of(rank.pid) == own_umask(), "as a plain start has"
    assert stat.S_IMODE((work / "made").stat().st_mode) == 0o666 & ~own_umask()
    assert stat.S_IMODE((work / "folder").stat().st_mode) == 0o777 & ~own_umask()
    keeper = rank.parent()
    assert keeper is not None
    closed = [stack.daemon_pid(), keeper.pid, *stack.head_pids().values()]
    assert {pid: oct(umask_of(pid)) for pid in closed} == dict.fromkeys(closed, "0o77")
    stack.client.cancel(job_id)
    stack.client.wait(job_id, timeout_seconds=PATIENCE_SECONDS)


def mode_of(path: Path) -> int:
    """Return the path's mode; 0 if it was removed since it was listed, like the draft of another job's report."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0


@as_root
@pytest.mark.parametrize("what", ["home", "ray", "jobs", "run/orch.sock", "ray/s/session_latest", "ray/token"])
def test_another_user_gets_at_nothing(stack: Stack, what: str) -> None:
    path = stack.home / what
    assert path.exists() or what == "home"
    assert "PermissionError" in as_user(OTHER, lambda: os.stat(path))
    assert "PermissionError" in as_user(OTHER, lambda: os.listdir(stack.home))


def test_the_rendezvous_of_a_job_on_one_machine_is_not_on_the_network(stack: Stack, tmp_path: Path) -> None:
    script = "import os; print('at', os.environ['MASTER_ADDR'])"
    spec = {
        "version": 1,
        "name": "meets",
        "entrypoint": "python train.py",
        "resources": {"num_workers": 2, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
    }
    job_id = stack.submit(json.dumps(spec), tmp_path, train=script)
    stack.client.wait(job_id, timeout_seconds=PATIENCE_SECONDS)
    assert "at 127.0.0.1" in stack.log(job_id)
