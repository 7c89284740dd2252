"""The processes that a drill sends signals to."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.cli.drills.drills import RankProcesses, send_signal
from tests.support.stack import PATIENCE_SECONDS


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def job(*pids: int, node: str = "", state: str = "RUNNING") -> Any:
    gpus = [SimpleNamespace(node=node or socket.gethostname(), pid=pid) for pid in pids]
    return SimpleNamespace(id="digits-abc234", state=state, gpus=gpus)


def processes(now: Any, rank: int, placed: tuple[int, ...] = ()) -> RankProcesses:
    events = [
        SimpleNamespace(kind="gang_placed", body={"seats": [{"actor_pid": pid}, {"actor_pid": pid + 1}]})
        for pid in placed
    ]
    client: Any = SimpleNamespace(job=lambda _: now, events=lambda _: events)
    return RankProcesses(client, now, rank)


def test_a_process_is_killed_and_named(process: subprocess.Popen[bytes]) -> None:
    assert send_signal(lambda: process.pid, "rank 0") == f"killed rank 0 (process {process.pid})"
    assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


def test_a_process_that_is_another_one_once_it_is_held_gets_no_signal(process: subprocess.Popen[bytes]) -> None:
    found = iter([process.pid, process.pid + 1])
    with pytest.raises(RefusedError, match="rank 0 was restarted just now"):
        send_signal(lambda: next(found), "rank 0")
    assert process.poll() is None


def test_where_there_is_no_process_the_drill_is_refused(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pid in (0, process.pid):
        with pytest.raises(RefusedError, match="rank 0 has no process on this machine"):
            send_signal(lambda pid=pid: pid, "rank 0")  # type: ignore[misc]


def test_the_training_process_is_that_of_the_running_job() -> None:
    assert processes(job(11, 12), 1).rank_pid() == 12
    assert processes(job(11), 1).rank_pid() == 0
    assert processes(job(11, 12, state="RESTARTING"), 1).rank_pid() == 0


def test_the_actor_is_that_of_the_newest_gang() -> None:
    assert processes(job(11, 12), 1).actor_pid() == 0
    assert processes(job(11, 12), 1, placed=(20, 30)).actor_pid() == 31


def test_a_rank_of_another_machine_is_refused() -> None:
    processes(job(11, 12), 1).require_here()
    with pytest.raises(RefusedError, match="rank 1 of digits-abc234 runs on elsewhere"):
        processes(job(11, 12, node="elsewhere"), 1).require_here()
    with pytest.raises(RefusedError, match=r"runs on \?"):
        processes(job(11), 1).require_here()
