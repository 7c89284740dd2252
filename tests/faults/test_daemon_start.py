"""A daemon that does not come up says why and leaves nothing; one that is stopped is told; one that goes is gone."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from orchestrator.api.transport.peer import is_stopped
from tests.support.processes import all_gone
from tests.support.stack import Stack, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A home without a daemon."""
    made = Stack(simulate_gpus=1)
    yield made
    made.close()


def left_of(stack: Stack) -> list[int]:
    """Every live process of the home: its daemon, its Ray, its fork servers."""
    marks = (f"ORCH_HOME={stack.home}", str(stack.home), str(stack.node_root))
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            told = [*process.cmdline(), *(f"{name}={value}" for name, value in process.environ().items())]
            if any(mark in part for part in told for mark in marks):
                found.append(process.pid)
    return found


def test_up_beside_a_daemon_that_is_stopped(stack: Stack) -> None:
    pid = stack.up()["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until("it is stopped", lambda: is_stopped(pid))
    for command in (["up"], ["status"], ["down"], ["submit", "-"]):
        done = stack.orch(*command)
        assert done.returncode == 4, (command, done.stderr)
        assert f"process {pid}" in done.stderr.splitlines()[0]
        assert f"kill -CONT {pid}" in done.stderr
    os.kill(pid, signal.SIGCONT)
    all_gone("the daemon that was asked to stop", [pid], 60)
    stack.up()


def test_up_beside_one_that_was_stopped_before_it_listened(stack: Stack) -> None:
    daemon = stack.serve()
    store = stack.settings.paths.store
    wait_until("it holds the store", store.with_name(store.name + ".lock").exists)
    daemon.send_signal(signal.SIGSTOP)
    stack.settings.socket.unlink(missing_ok=True)
    done = stack.orch("up", "--json")
    daemon.kill()
    daemon.wait()
    assert done.returncode == 4, done.stderr
    assert str(daemon.pid) in done.stderr


def test_a_failed_up_says_why_first_and_leaves_no_process(stack: Stack) -> None:
    (stack.settings.paths.ray).mkdir(parents=True)
    (stack.settings.paths.ray / "s").write_text("not a directory")
    done = stack.orch("up", "--read-listen", "")
    assert done.returncode == 5
    first = done.stderr.splitlines()[0]
    assert "the daemon did not start" in first
    assert "Ray's head did not start" in first
    assert "Traceback" not in done.stderr
    log = stack.daemon_log()
    assert log.count("ray.start_failed") == 2
    assert "Event loop is closed" not in log
    assert left_of(stack) == []
    assert not stack.node_root.exists()


def test_a_store_that_cannot_be_opened_is_the_first_thing_said(stack: Stack) -> None:
    stack.settings.paths.store.write_bytes(b"no database at all" * 1000)
    done = stack.orch("up")
    assert done.returncode == 5
    assert "cannot be read as a store" in done.stderr.splitlines()[0]
    assert left_of(stack) == []


@pytest.mark.parametrize("moment", ["the fork server is begun", "the head is there"])
def test_a_start_that_is_cut_short_leaves_no_process(stack: Stack, moment: str) -> None:
    daemon = stack.serve()
    head = stack.settings.paths.ray / "head.json"
    begun = {
        "the fork server is begun": lambda: any(stack.node_root.glob("local/fork/*.sock")),
        "the head is there": head.exists,
    }
    wait_until(moment, begun[moment], 60, interval=0.001)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(timeout=120) == 0, stack.serve_log()
    assert "Traceback" not in stack.serve_log()
    assert left_of(stack) == []


def test_down_returns_when_nothing_is_left(stack: Stack) -> None:
    stack.up()
    assert len(left_of(stack)) > 3
    assert stack.orch("down").returncode == 0
    assert left_of(stack) == []
