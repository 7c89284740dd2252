"""The walk finds the processes below a process, with both interfaces of the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from orchestrator.runtime.forkserver import linux
from tests.support.stack import PATIENCE_SECONDS


@pytest.fixture
def shell() -> subprocess.Popen[bytes]:
    """Start a process with a child and a grandchild."""
    program = "sh -c 'sleep 1000 & wait' & echo up; wait"
    return subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, start_new_session=True)


def grown(root: int) -> list[int]:
    until = time.monotonic() + 300
    while len(found := linux.descendants(root)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("lists", [False, True])
def test_descendants(shell: subprocess.Popen[bytes], lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without the lists has the same processes."""
    if not lists:
        monkeypatch.setattr(linux, "_children_from_tasks", lambda _pid: [])
    child, grandchild = grown(shell.pid)
    assert linux.children(shell.pid) == [child]
    assert linux.children(child) == [grandchild]
    assert linux.kill_sweep(shell.pid) == 2
    shell.communicate(timeout=PATIENCE_SECONDS)  # it waited for the two
    assert linux.descendants(shell.pid) == []


def test_name_with_parentheses_does_not_confuse_the_scan() -> None:
    sleeper = subprocess.Popen(["bash", "-c", "exec -a ') S 1 (' python3 -c 'import ctypes, time; ctypes.CDLL(None).prctl(15, b\") R 1 (\", 0, 0, 0); print(flush=True); time.sleep(99)'"], stdout=subprocess.PIPE)  # fmt: skip
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    try:
        assert sleeper.pid in linux._children_from_scan()(os.getpid())
    finally:
        sleeper.kill()
        sleeper.communicate()


def test_the_dead_are_not_signalled() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert not linux.kill(process.pid, signal.SIGTERM)
    assert linux.descendants(process.pid) == []
