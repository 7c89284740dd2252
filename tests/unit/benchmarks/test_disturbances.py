"""What a soak tells of growth, and that it disturbs everything that a job stands on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.disturbances import SIGNALS, Disturber, growth
from tests.support.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path


def test_growth_is_told_per_thousand_recoveries() -> None:
    first = (100, {"open_files": 100.0, "shm_bytes": 0.0})
    last = (600, {"open_files": 101.0, "shm_bytes": 0.0})
    assert growth([first, (200, {}), last]) == {"open_files": 2.0, "shm_bytes": 0.0}
    assert growth([first]) is None


@pytest.fixture
def disturber(tmp_path: Path) -> Disturber:
    stack: Any = SimpleNamespace(daemon_pid=lambda: 0)
    return Disturber(stack, Ledger(tmp_path / "ledger"), "job-1", random.Random(1))


def test_everything_that_a_job_stands_on_is_a_victim(disturber: Disturber) -> None:
    assert set(disturber.victims()) == {
        *("rank", "keeper", "actor", "fork server", "agent", "daemon", "raylet", "control store")
    }
    assert {SIGNALS["kill"], SIGNALS["terminate"], SIGNALS["stop"]} == {signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP}


def test_what_is_just_not_there_is_passed_over(disturber: Disturber, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for find in (lambda: 0, lambda: gone.pid, lambda: {}["raylet"]):
        monkeypatch.setattr(Disturber, "victims", lambda self, find=find: {"raylet": find})
        assert disturber._hit("raylet", signal.SIGKILL) == 0
    assert disturber.found.problems == []


def test_a_process_is_hit(disturber: Disturber, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(Disturber, "victims", lambda self: {"agent": lambda: victim.pid})
    assert disturber._hit("agent", signal.SIGKILL) == victim.pid
    assert victim.wait(timeout=60) == -signal.SIGKILL
