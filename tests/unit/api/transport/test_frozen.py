"""A daemon that is stopped by a signal is distinguished from a slow one, whatever the call's own deadline is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import EXIT_UNREACHABLE, DaemonFrozenError, DaemonUnreachableError, DeadlineError
from orchestrator.api.transport import submission, wire
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.transport.peer import is_stopped
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(int(sys.argv[2]))
print("listening", flush=True)
kept = []
while True:
    kept.append(listener.accept())
"""


class Silent:
    """A process that accepts connections and answers none."""

    def __init__(self, folder: Path, backlog: int = 16) -> None:
        self.endpoint = Endpoint(socket_path=str(folder / "s"))
        command = [sys.executable, "-c", LISTENER, str(folder / "s"), str(backlog)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def stop(self) -> int:
        """Stop the process; return its process id once the kernel reports it as stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        wait_until("the process is stopped", lambda: is_stopped(self.process.pid))
        return self.process.pid

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Silent]:
    """Start a listener that never answers."""
    made = Silent(tmp_path)
    yield made
    made.close()


def test_a_stopped_daemon_is_named_with_the_remedy(silent: Silent) -> None:
    pid = silent.stop()
    with pytest.raises(DaemonFrozenError, match=f"process {pid}") as caught:
        Client(silent.endpoint, deadline_seconds=0.2).health()
    assert caught.value.exit_code == EXIT_UNREACHABLE
    assert f"kill -CONT {pid}" in caught.value.hint


def test_a_long_deadline_does_not_hold_up_the_news(silent: Silent) -> None:
    endpoint = silent.endpoint._replace(silence_seconds=0.2)
    silent.stop()
    with pytest.raises(DaemonFrozenError):
        wire.call(endpoint, "POST", "/api/v1/prune", body={}, deadline_seconds=3600.0)


def test_a_slow_daemon_is_not_called_stopped(silent: Silent) -> None:
    with pytest.raises(DeadlineError) as caught:
        Client(silent.endpoint, deadline_seconds=0.2).health()
    assert type(caught.value) is DeadlineError


def test_a_submission_to_a_stopped_daemon_is_not_sent_again(silent: Silent) -> None:
    endpoint = silent.endpoint._replace(silence_seconds=0.2)
    pid = silent.stop()
    body = submission.request_body("name: x", "job.yaml", environ={}, cwd="/")
    with pytest.raises(DaemonFrozenError, match=f"process {pid}") as caught:
        submission.submit(endpoint, body, environ={}, deadline_seconds=3600.0)
    assert "orch status" in caught.value.hint


def fill_queue(endpoint: Endpoint, kept: contextlib.ExitStack) -> None:
    for _ in range(100):
        kept.enter_context(wire.connect(endpoint, time.monotonic() + 3600.0))


def test_a_full_queue_of_connections_has_an_end(tmp_path: Path) -> None:
    silent = Silent(tmp_path, backlog=1)
    try:
        silent.stop()
        with contextlib.ExitStack() as kept, pytest.raises(DaemonUnreachableError) as caught:
            fill_queue(silent.endpoint._replace(connect_seconds=0.2), kept)
        assert caught.value.exit_code == EXIT_UNREACHABLE
    finally:
        silent.close()


def test_a_process_that_is_gone_is_not_stopped(silent: Silent) -> None:
    silent.close()
    assert not is_stopped(silent.process.pid)
