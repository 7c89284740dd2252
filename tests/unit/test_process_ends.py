"""A process that has ended is not waited for, whether it is reaped or not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from orchestrator.process_ends import wait_ended

NEVER_REAPS = """
import os, time
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", NEVER_REAPS], stdout=subprocess.PIPE, text=True) as process:
        yield process
        for child in psutil.Process(process.pid).children():
            child.kill()
        process.kill()


def test_one_that_is_not_reaped_has_ended(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    child.kill()
    assert wait_ended([child], 300.0) == []
    assert child.status() == psutil.STATUS_ZOMBIE


def test_those_that_live_are_returned(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        known = psutil.Process(ended.pid)
    assert wait_ended([known, child], 0.01) == [child]
    assert wait_ended([], 300.0) == []


def test_a_child_of_ones_own_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert wait_ended([psutil.Process(child.pid)], 300.0) == []
    assert not psutil.pid_exists(child.pid)
    child.wait()
