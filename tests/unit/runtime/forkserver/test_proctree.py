"""The walk finds what is below a process, by both of the kernel's ways."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from orchestrator.runtime.forkserver import proctree


@pytest.fixture
def shell() -> subprocess.Popen[bytes]:
    """A process with a child and a grandchild."""
    program = "sh -c 'sleep 1000 & wait' & echo up; wait"
    return subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, start_new_session=True)


def grown(root: int) -> list[int]:
    until = time.monotonic() + 10
    while len(found := proctree.descendants(root)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("scan", [True, False])
def test_descendants(shell: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    if scan:
        monkeypatch.setattr(proctree, "_HAS_CHILDREN_FILES", False)
    elif not proctree._HAS_CHILDREN_FILES:
        pytest.skip("this kernel lists no children")
    child, grandchild = grown(shell.pid)
    assert proctree.children(shell.pid) == [child]
    assert proctree.children(child) == [grandchild]
    assert proctree.kill_sweep(shell.pid) == 2
    shell.communicate(timeout=10)  # it waited for the two
    assert proctree.descendants(shell.pid) == []


def test_name_with_parentheses_does_not_confuse_the_scan() -> None:
    sleeper = subprocess.Popen(["bash", "-c", "exec -a ') S 1 (' python3 -c 'import ctypes, time; ctypes.CDLL(None).prctl(15, b\") R 1 (\", 0, 0, 0); print(flush=True); time.sleep(99)'"], stdout=subprocess.PIPE)  # fmt: skip
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    try:
        assert proctree._parents()[sleeper.pid] == os.getpid()
    finally:
        sleeper.kill()
        sleeper.communicate()


def test_the_dead_are_not_signalled() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert not proctree.kill(process.pid, signal.SIGTERM)
    assert proctree.descendants(process.pid) == []
