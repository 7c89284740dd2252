"""A process runs its first line only once its owner has received the reply: a lost reply starts nothing."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.wire import SpawnRequest
from tests.integration.forkserver_fixture import (
    BARE_PYTHON,
    ENVIRONMENT,
    RunningServer,
    alive,
    running_server,
    wait_until,
)

pytestmark = pytest.mark.rare

READ = "0"
"""Number of the system call `read` on x86-64, as /proc shows it."""


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(str(BARE_PYTHON)) as running:  # without torch: warm at once
        yield running


def asked(server: RunningServer, folder: Path, mode: str, **env: str) -> tuple[socket.socket, int, int]:
    """Send a request by hand, and wait for its reply; return the lifeline, still unused, the lock and the keeper."""
    target, args = ("/bin/touch", ("ran",)) if mode == "command" else ("code.py", ())
    (folder / "code.py").write_text("open('ran', 'w')\n")
    request = SpawnRequest(mode=mode, target=target, args=args, cwd=str(folder), env=ENVIRONMENT | env)
    lifeline, theirs = socket.socketpair()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    null = os.open(os.devnull, os.O_WRONLY)
    roles = {"stdout": null, "stderr": null, "lifeline": theirs.fileno(), "lease": lock}
    message, fds = request.message(roles)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, theirs:
        sock.connect(str(server.socket))
        socket.send_fds(sock, [wire.encode({"protocol": wire.PROTOCOL, **message})], fds)
        header = sock.recv(wire.HEADER.size, socket.MSG_WAITALL)
        reply = wire.decode(sock.recv(wire.body_length(header), socket.MSG_WAITALL))
    os.close(null)
    assert reply["ok"]
    return lifeline, lock, reply["keeper_pid"]


def waits_at_the_gate(keeper: int) -> bool:
    """Return whether the keeper's child is in read(), the only wait before its first line."""
    for child in psutil.Process(keeper).children():
        if Path(f"/proc/{child.pid}/syscall").read_text().split()[0] == READ:
            return True
    return False


@pytest.mark.parametrize(
    ("mode", "env"),
    [("script", {}), ("script", {"PYTHONHASHSEED": "7"}), ("command", {})],
    ids=["a fork", "a fresh interpreter", "a command"],
)
def test_what_its_owner_does_not_know_of_never_runs(
    server: RunningServer, tmp_path: Path, mode: str, env: dict[str, str]
) -> None:
    lifeline, lock, keeper = asked(server, tmp_path, mode, **env)
    ran = tmp_path / "ran"
    wait_until(lambda: ran.exists() or waits_at_the_gate(keeper), "the process to be ready")
    assert not ran.exists()
    lifeline.close()
    wait_until(lambda: not alive(keeper), "the keeper to end")
    assert not ran.exists()
    os.close(lock)


def test_a_process_whose_keeper_is_killed_at_the_gate_never_runs(server: RunningServer, tmp_path: Path) -> None:
    lifeline, lock, keeper = asked(server, tmp_path, "script")
    with lifeline:
        wait_until(lambda: waits_at_the_gate(keeper), "the process to be ready")
        (child,) = psutil.Process(keeper).children()
        psutil.Process(keeper).kill()
        wait_until(lambda: not alive(child.pid), "the process to end")
        assert not (tmp_path / "ran").exists()
    os.close(lock)
