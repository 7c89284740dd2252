"""What a soak tells of growth, and that it disturbs everything that a job stands on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import disturbances
from benchmarks.disturbances import SIGNALS, Disturber, Found, growth, sitting, whole
from tests.support.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path


def test_growth_is_told_per_thousand_recoveries() -> None:
    first = (100, {"open_files": 100.0, "shm_bytes": 0.0})
    last = (600, {"open_files": 101.0, "shm_bytes": 0.0})
    assert growth([first, (200, {}), last]) == {"open_files": 2.0, "shm_bytes": 0.0}
    assert growth([first]) is None


def test_a_call_goes_on_from_the_result_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    def run(count: int, seconds: float, seed: int, per_round: int) -> tuple[Found, list[Any]]:
        asked.append((count, seed))
        found = Found(recoveries=min(count, 3))
        found.disturbances["kill rank"] = found.recoveries
        found.seconds["kill rank"] = [0.1] * found.recoveries
        return found, []

    monkeypatch.setattr(disturbances, "run", run)
    file = tmp_path / "result.json"
    common = ["disturbances", "--seed", "7", "--disturbances", "5", "--json", str(file)]
    for before in ([], ["--before", str(file)], ["--before", str(file)]):
        monkeypatch.setattr(sys, "argv", [*common, *before])
        assert disturbances.main() == 0
    assert asked == [(5, 7), (2, 8)], "there is nothing left for the third"
    assert "has 5 recoveries already" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["ours"] == {"median": 0, "n": 5, "passed_over": 0}
    assert (result["met"], result["by_disturbance"], len(result["sittings"])) == (True, {"kill rank": 5}, 2)


def test_a_promise_that_was_broken_once_stays_in_the_result() -> None:
    broken = sitting(Found(recoveries=1, problems=["a step was left out"]), [], 1.0, 1)
    result = whole([broken, sitting(Found(recoveries=9), [], 1.0, 2)])
    assert (result["ours"]["median"], result["ours"]["n"], result["met"]) == (1, 10, False)


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
