"""A Ray that blocks while it connects: another process meets it first, and a frozen daemon ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from orchestrator.runtime.cluster.head.start import START_TRIES, SYSTEM_CONFIG, ClusterError
from structlog.testing import capture_logs

from orchestrator.runtime.cluster import connection as module
from orchestrator.runtime.cluster.connection import RayConnection
from tests.support.processes import all_gone
from tests.support.stack import PATIENCE_SECONDS

HANG = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
time.sleep(1000)
"""
FROZEN = """
import asyncio, ctypes
from orchestrator.runtime.cluster.connection import RayConnection

def freeze(*_):
    ctypes.PyDLL(None).sleep(1000)  # as ray.init does, it keeps the interpreter's lock

ray = RayConnection("orch-x", connect=freeze, disconnect=freeze, frozen_seconds=lambda: 0.2)
asyncio.run(ray.enter("127.0.0.1:1", proven=True) if "enter" in __import__("sys").argv else ray.leave())
"""


def test_a_trial_that_hangs_is_killed_and_the_daemon_connects_when_the_next_one_succeeds(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, connected, problems = f"{tmp_path}/pids", list[str](), list[str]()

    def trial(_address: str, _space: str, _seconds: float) -> list[str]:
        tries.append(ray.problem)
        return ["echo", "connected"] if len(tries) == START_TRIES else [sys.executable, "-c", HANG, pids]

    async def enter() -> None:
        await ray.enter("127.0.0.1:1", hint="; see its logs")
        problems.append(ray.problem)
        ray.opened()

    tries: list[str] = []
    monkeypatch.setattr(module, "start_seconds", lambda: 1.0)
    ray = RayConnection("orch-x", connect=lambda address, _space: connected.append(address), try_first=trial)
    with capture_logs() as logs:
        asyncio.run(enter())
    assert connected == ["127.0.0.1:1"]
    assert tries[0] == ""
    reason = "cannot connect to Ray at 127.0.0.1:1: it did not register a driver within 1 s; see its logs"
    assert {*tries[1:], *problems} == {reason}, "it can be seen meanwhile"
    assert ray.problem == "", "since gangs can be placed"
    assert [line["tried"] for line in logs if line["event"] == "ray.connect_failed"] == [1, 2]
    with open(pids) as file:
        all_gone("the trials", [int(line) for line in file])


@pytest.mark.parametrize(
    ("program", "reason"),
    [("import sys; sys.exit('wrong version')", "wrong version"), ("import os; os._exit(3)", "it ended with 3")],
)
def test_a_trial_that_fails_is_not_repeated_and_the_daemon_does_not_try_itself(program: str, reason: str) -> None:
    connected, tries = list[str](), list[str]()

    def trial(address: str, _space: str, _seconds: float) -> list[str]:
        tries.append(address)
        return [sys.executable, "-c", program]

    ray = RayConnection("orch-x", connect=lambda address, _space: connected.append(address), try_first=trial)
    with pytest.raises(ClusterError, match=f"cannot connect to Ray at 127.0.0.1:1: {reason}"):
        asyncio.run(ray.enter("127.0.0.1:1"))
    assert (tries, connected) == (["127.0.0.1:1"], [])


@pytest.mark.parametrize("step", ["enter", "leave"])
def test_a_daemon_that_ray_freezes_ends_and_says_where(step: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FROZEN, step], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in freeze" in ended.stderr


def test_the_first_driver_of_a_head_waits_for_no_worker() -> None:
    """Ray registers it once as many workers as CPUs have registered: never, if one of them is too slow."""
    assert SYSTEM_CONFIG["prestart_worker_first_driver"] is False
