"""The late agent listens in place of another program, and becomes it at the first connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.runtime.cluster.head import late_agent
from tests.support.stack import process_gone, wait_until

PROGRAM = """
import os, socket, sys
from aiohttp import web
own = socket.socket()
own.bind(("127.0.0.1", 0))
web.run_app(" ".join([str(os.getpid()), *sys.argv[1:], __name__]), sock=own, loop=None)
"""
WEB = """
def run_app(app, *, sock, loop):
    connection, _ = sock.accept()
    with connection:
        connection.sendall(connection.recv(100) + b" " + app.encode())
"""


@contextmanager
def late_agent_of(raylet: int, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the late agent of a program that answers one call; yield it and the file with its port."""
    (folder / "thirdparty_files" / "aiohttp").mkdir(parents=True)
    (folder / "thirdparty_files" / "aiohttp" / "__init__.py").touch()
    (folder / "thirdparty_files" / "aiohttp" / "web.py").write_text(WEB)
    (folder / "main.py").write_text(PROGRAM)
    port_file = folder / "port"
    command = late_agent.command(sys.executable, "127.0.0.1", str(port_file))
    process = subprocess.Popen(
        [*command, sys.executable, "-u", str(folder / "main.py"), "--node-id=1"],
        env={**os.environ, late_agent.RAYLET_PID: str(raylet)},
    )
    try:
        wait_until("it listens", port_file.exists)
        yield process, port_file
    finally:
        process.kill()
        process.wait()


def test_it_becomes_the_program_which_serves_the_call_that_waits(tmp_path: Path) -> None:
    with late_agent_of(os.getpid(), tmp_path) as (process, port_file):
        with socket.create_connection(("127.0.0.1", int(port_file.read_text())), timeout=300) as connection:
            connection.sendall(b"called")
            answer = b"".join(iter(lambda: connection.recv(100), b""))
        assert answer == f"called {process.pid} --node-id=1 __main__".encode()
        assert process.wait(timeout=300) == 0


def closed_for(uid: int, port: int) -> bool:
    """Whether a connection of this user is closed without an answer."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(uid)
            with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
                code = len(connection.recv(1))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_connection_of_another_user_starts_nothing(tmp_path: Path) -> None:
    with late_agent_of(os.getpid(), tmp_path) as (process, port_file):
        port = int(port_file.read_text())
        if os.getuid() == 0:
            assert closed_for(65534, port)
            assert late_agent._SOCKET not in Path(f"/proc/{process.pid}/cmdline").read_text(), "nothing was executed"
        with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
            connection.sendall(b"called")
            assert connection.recv(100)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_user_of_a_connection_is_the_one_that_the_kernel_lists(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        with socket.create_connection(listener.getsockname()[:2]):
            accepted, _ = listener.accept()
            with accepted:
                assert late_agent.is_of_this_user(accepted)
                assert not late_agent.is_of_this_user(accepted, os.getuid() + 1)
        left = socket.create_connection(listener.getsockname()[:2])
        accepted, _ = listener.accept()
        left.close()
        with accepted:
            wait_until("it has closed", lambda: not late_agent.is_of_this_user(accepted))
            assert not late_agent.is_of_this_user(accepted, 0), "root is not assumed"


def test_it_ends_with_its_raylet_and_imports_nothing_large(tmp_path: Path) -> None:
    raylet = subprocess.Popen(["sleep", "1000"])
    try:
        with late_agent_of(raylet.pid, tmp_path) as (process, _):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "site-packages" not in maps
            raylet.send_signal(signal.SIGKILL)
            raylet.wait()
            wait_until("it has ended", lambda: process.poll() is not None or process_gone(process.pid))
    finally:
        raylet.kill()
        raylet.wait()
