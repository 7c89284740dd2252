"""A campaign of disturbances: the growth that it reports, and that it disturbs everything that a job depends on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchmarks.disturbances import __main__ as disturbances
from benchmarks.disturbances.accounts import Rest, growth, sitting, whole
from benchmarks.disturbances.disturber import SIGNALS, Disturber, Found
from benchmarks.disturbances.places import OneGpu, OneNode, ThreeNodes, Victim
from tests.support.fake_nvml import FakeNvml
from tests.support.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVERYTHING = {"rank", "keeper", "actor", "fork server", "agent", "daemon", "raylet", "control store"}


def test_growth_is_the_usual_slope_per_thousand_recoveries() -> None:
    files = [100.0, 104.0, 104.5, 150.0, 105.5, 106.0]  # the first round is a warm-up, and one was sampled during work
    rests = [Rest(100 * number, {"open_files": held, "shm_bytes": 0.0}) for number, held in enumerate(files, 1)]
    assert growth(rests) == {"open_files": 5.0, "shm_bytes": 0.0}
    assert growth(rests[:2]) is None
    later = Rest(rests[1].recoveries + 5, {"open_files": 1e6, "shm_bytes": 0.0})
    assert growth([*rests[:2], later]) is None, "a slope over five recoveries says nothing"


def made(recoveries: int, seconds: float = 0.1, place: str = "node", **changes: Any) -> dict[str, Any]:
    found = Found(recoveries=recoveries, **changes)
    found.disturbances["kill rank"] = recoveries
    found.seconds["kill rank"] = [seconds] * recoveries
    return sitting(found, [], 1.0, 7, place, 0)


def test_a_call_goes_on_from_the_result_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, int]] = []

    def places(_: Any, count: int, seed: int) -> list[dict[str, Any]]:
        asked.append((count, seed))
        return [made(min(count, 3))]

    monkeypatch.setattr(disturbances, "places", places)
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


def test_nothing_to_disturb_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["disturbances", "--places", "0", "--clusters", "0"])
    with pytest.raises(SystemExit):
        disturbances.main()
    assert "ask for a place or a cluster" in capsys.readouterr().err


def test_a_promise_that_was_broken_once_stays_in_the_result() -> None:
    result = whole([made(1, problems=["a step was left out"]), made(9)])
    assert (result["ours"]["median"], result["ours"]["n"], result["met"]) == (1, 10, False)


def test_recoveries_are_told_by_what_was_done_and_where() -> None:
    pair = made(0)
    pair["seconds_of"] = {"kill agent and kill rank": [3.0], "freeze daemon and kill rank": [1.0]}
    told = whole([made(2, 0.5), made(1, 1.5), made(1, 4.0, place="cluster"), made(1, 0.7, place="gpu"), pair])[
        "recovery_seconds"
    ]
    assert told["kill rank"] == {"median": 0.5, "p99": 1.48, "max": 1.5, "n": 3}
    assert told["kill rank, 3 nodes"]["max"] == 4.0
    assert told["kill rank, on a GPU"]["max"] == 0.7
    assert told["two at once"]["n"] == 2


class FewVictims(OneNode):
    """A place with at most one victim."""

    def __init__(self, find: Callable[[], Victim | None]) -> None:
        self.stack: Any = SimpleNamespace(daemon_pid=lambda: 0)
        self.find = find

    def victims(self, job_id: str, dice: random.Random) -> dict[str, Callable[[], Victim | None]]:
        del job_id, dice
        return {"raylet": self.find}


def disturber(tmp_path: Path, find: Callable[[], Victim | None]) -> Disturber:
    return Disturber(FewVictims(find), Ledger(tmp_path / "ledger"), "job-1", random.Random(1))


@pytest.mark.parametrize("place", [OneNode, OneGpu, ThreeNodes])
def test_everything_that_a_job_stands_on_is_a_victim(place: type[OneNode | ThreeNodes]) -> None:
    any_place: Any = SimpleNamespace(stack=SimpleNamespace(daemon_pid=lambda: 0), cluster=None)
    assert set(place.victims(any_place, "job-1", random.Random(1))) == EVERYTHING
    assert {SIGNALS["kill"], SIGNALS["terminate"], SIGNALS["stop"]} == {signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP}


def test_what_ended_jobs_have_of_a_gpu_is_waited_for(tmp_path: Path) -> None:
    nvml, mine = FakeNvml.create(tmp_path, gpus=1), psutil.Process()
    place: Any = SimpleNamespace(processes=lambda: [mine])
    with nvml.loaded():
        nvml[0].processes({mine.pid: 5, 7: 3})
        assert OneGpu.held_elsewhere(place) == {"gpu_bytes": 5}
        waiting = threading.Thread(target=OneGpu.free_of, args=(place, {7, 8}))
        waiting.start()
        waiting.join(1)
        assert waiting.is_alive()
        nvml[0].processes({mine.pid: 5})
        waiting.join(60)
        assert not waiting.is_alive()


def test_what_is_just_not_there_is_passed_over(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    nothing: dict[str, Victim] = {}
    for find in (lambda: None, lambda: Victim(gone.pid), lambda: nothing["raylet"]):
        assert disturber(tmp_path, find)._hit("raylet", signal.SIGKILL) is None


def test_a_process_is_hit(tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found = Victim(victim.pid, carries=True)
    assert disturber(tmp_path, lambda: found)._hit("raylet", signal.SIGKILL) == found
    assert victim.wait(timeout=60) == -signal.SIGKILL


def test_what_a_user_does_is_a_disturbance_whose_broken_promise_is_a_problem(tmp_path: Path) -> None:
    """The job must make a new step after it, as after a signal."""
    done: list[str] = []
    place: Any = FewVictims(lambda: None)
    ledger: Any = SimpleNamespace(last_step=lambda _job: len(done))
    place.stack.job = lambda _job: SimpleNamespace(state="RUNNING", attempt=1)
    place.stack.home, place.stack.daemon_pid = tmp_path, lambda: 7
    place.abuses = {"full disk": lambda _stack, _dice: done.append("full disk")}
    disturbs = Disturber(place, ledger, "job-1", random.Random(1))
    while not done:
        disturbs.once()
    assert (disturbs.found.recoveries, disturbs.found.disturbances["full disk"]) == (1, 1)

    def breaks(_stack: object, _dice: object) -> None:
        raise AssertionError("a job was lost")

    place.abuses = {"full disk": breaks}
    with pytest.raises(AssertionError, match="a job was lost"):
        disturbs._abuse("full disk")
    assert disturbs.found.recoveries == 1


def test_what_only_its_owner_could_replace_is_only_frozen(tmp_path: Path) -> None:
    guest: Any = SimpleNamespace(only_frozen=ThreeNodes.only_frozen)
    disturbs = Disturber(guest, Ledger(tmp_path / "ledger"), "job-1", random.Random(1))
    assert {disturbs._manner("control store") for _ in range(50)} == {"freeze"}
    assert {disturbs._manner("raylet") for _ in range(50)} == {"freeze", "kill", "terminate"}
    assert {disturbs._manner("rank") for _ in range(50)} == set(SIGNALS)
