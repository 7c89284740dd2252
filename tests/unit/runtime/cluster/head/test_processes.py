"""Only a head's own processes are killed with it, whatever else names its files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from orchestrator.runtime.cluster.head.processes import Head, clear_sessions, kill_session, ray_environment

from orchestrator.process_ends import wait_ended

WAITS = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., psutil.Process]]:
    """Yield a function that starts a process with these arguments and the token at this path, if any."""
    begun: list[subprocess.Popen[bytes]] = []

    def started(*arguments: str, token: Path | None = None) -> psutil.Process:
        environ = dict(os.environ) | (ray_environment(token) if token else {})
        one = subprocess.Popen(
            [sys.executable, "-c", WAITS, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        begun.append(one)
        assert one.stdout is not None
        one.stdout.readline()  # it runs its own program, with its own environment
        return psutil.Process(one.pid)

    yield started
    for one in begun:
        one.kill()
        one.communicate()


def ended(process: psutil.Process) -> bool:
    """Return whether the process has ended, reaped or not."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("by", ["the session's directory", "the directory of sessions", "the starter's options"])
def test_a_reader_of_a_head_s_files_outlives_it(tmp_path: Path, start: Callable[..., psutil.Process], by: str) -> None:
    token, session = tmp_path / "token", tmp_path / "s" / "session_1"
    named = (
        f'{{"temp_dir": "{session.parent}"}}' if by == "the starter's options" else f"--log={session}/logs/raylet.out"
    )
    of_head = start(named, token=token)
    reader, of_another = start(named), start(named, token=tmp_path / "another" / "token")
    if by == "the session's directory":
        kill_session(Head(gcs_address="127.0.0.1:1", session_dir=str(session), pids={}), token)
    else:
        clear_sessions(session.parent, token)
    wait_ended([of_head], 60)
    assert [ended(one) for one in (of_head, reader, of_another)] == [True, False, False]


@pytest.mark.parametrize("late", ["cmdline", "environ"])
def test_a_process_that_is_just_starting_its_program_is_not_overlooked(
    tmp_path: Path, start: Callable[..., psutil.Process], monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The kernel sets a process's command line and its environment at the end of an exec."""
    token, sessions = tmp_path / "token", tmp_path / "s"
    stray = start(f"{sessions}/session_1/socket", token=token)
    read, unset = getattr(psutil.Process, late), [True, True]
    monkeypatch.setattr(psutil.Process, late, lambda one: () if one == stray and unset and unset.pop() else read(one))
    clear_sessions(sessions, token)
    wait_ended([stray], 60)
    assert ended(stray)
