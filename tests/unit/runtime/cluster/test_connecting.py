"""A Ray that blocks while it connects: another process meets it first, and a frozen daemon ends."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from orchestrator.runtime.cluster import connection as module
from orchestrator.runtime.cluster.cluster import refuse_exposed_token
from orchestrator.runtime.cluster.connection import RayConnection
from orchestrator.runtime.cluster.head import START_TRIES, ClusterError
from orchestrator.spec.token_file import TokenExposedError
from tests.support.processes import all_gone
from tests.support.stack import PATIENCE_SECONDS, wait_until

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

ray = RayConnection("orch-x", connect=freeze, disconnect=freeze, try_first=lambda *_: ["true"], frozen_seconds=lambda: 0.2)
asyncio.run(ray.enter("127.0.0.1:1") if "enter" in __import__("sys").argv else ray.leave())
"""


def test_a_trial_that_hangs_is_killed_and_the_daemon_connects_when_the_next_one_succeeds(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, connected, problems = f"{tmp_path}/pids", list[str](), list[str]()

    def trial(_address: str, _space: str, _seconds: float) -> list[str]:
        tries.append(ray.problem)
        return ["true"] if len(tries) == START_TRIES else [sys.executable, "-c", HANG, pids]

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


def reset_as_ray_does() -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGTERM, None)


def test_a_signal_after_a_disconnect_reaches_the_own_handler() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        asyncio.run(RayConnection("orch-x", disconnect=reset_as_ray_does).leave())
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until("it is seen", lambda: seen == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_token_of_an_existing_cluster_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")
    path.chmod(0o600)
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    refuse_exposed_token(environ)
    refuse_exposed_token({**environ, "RAY_AUTH_TOKEN_PATH": f"{path}.none"})
    path.chmod(0o644)
    with pytest.raises(TokenExposedError, match="mode 0644"):
        refuse_exposed_token(environ)
    refuse_exposed_token({**environ, "RAY_AUTH_TOKEN": "x"})
    refuse_exposed_token({})
