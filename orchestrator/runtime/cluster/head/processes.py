"""Finds, describes and ends the processes of an embedded Ray head, and sets the environment that they read.

Finds processes by the head's file, or by their command line and environment together; makes no call to Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import psutil

from orchestrator import trees
from orchestrator.process_ends import wait_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

T = TypeVar("T")

TOKEN_PATH: Final = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the variable's name
"""Environment variable of every process of an embedded head: the path of its token, which no other head has."""

EXEC_SECONDS: Final = 1.0
"""How long to wait for a process during an exec: its command line and environment are set last, and empty before."""

CLEAR_SECONDS: Final = 10.0
"""How long a start removes the logs of earlier heads: the next start continues."""

END_SECONDS: Final = 10.0
"""How long to wait for killed processes to end: one that waits for a disk may take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The running embedded head, as its file describes it."""

    gcs_address: str
    pids: Mapping[str, tuple[int, float]]
    session_dir: str


def read_head(path: Path) -> Head | None:
    """Return the head that the file describes, whether it runs or not; None without a readable file."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return Head(
        gcs_address=data["gcs_address"],
        session_dir=data["session_dir"],
        pids={name: (pid, created) for name, (pid, created) in data["pids"].items()},
    )


def write_head(path: Path, head: Head) -> None:
    """Write the head's file atomically."""
    fields = {"gcs_address": head.gcs_address, "session_dir": head.session_dir, "pids": dict(head.pids)}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(fields))
    temporary.replace(path)


def ray_environment(token: Path) -> dict[str, str]:
    """Return the environment variables that Ray reads in every process of an embedded head."""
    return {
        "RAY_AUTH_MODE": "token",
        TOKEN_PATH: str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray otherwise replaces the loopback address by the machine's external one, which may not be reachable from
        # inside, and opens its ports to the network.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # How long a connection attempt waits for a raylet that has died meanwhile. Ray's default of one minute would delay
        # the recovery by a minute.
        "RAY_gcs_server_request_timeout_seconds": "15",
    }


def kill_session(head: Head, token: Path) -> None:
    """Kill what is left of an embedded head with that ``token``: its processes, and everything they started.

    Returns when all have ended, or after END_SECONDS.
    """
    victims: list[psutil.Process] = []
    for pid, created in head.pids.values():
        if is_alive(pid, created):
            victims += _started_by(psutil.Process(pid))
    # Workers of a dead raylet; their command line names the session until they rename themselves.
    _kill([*victims, *_of_head(token, head.session_dir)])


def _started_by(root: psutil.Process) -> list[psutil.Process]:
    """List the process and all that it has started, also forks of a template that has ended."""
    found = {process.pid: process for process in (root, *root.children(recursive=True))}
    members = [] if _session(root.pid) == os.getsid(0) else of_session(root.pid)
    for orphan in (member for member in members if member.pid not in found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {process.pid: process for process in (orphan, *orphan.children(recursive=True))}
    return list(found.values())


def of_session(pid: int) -> list[psutil.Process]:
    """List the processes in the session of ``pid``: for a raylet, its workers, also forks of an ended template."""
    with contextlib.suppress(ProcessLookupError):
        session = os.getsid(pid)
        return [process for process in psutil.process_iter() if _session(process.pid) == session]
    return []


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def end_fork_server(pid: int) -> None:
    """End a fork server that has forked no rank, with its spare processes; return when they have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        _kill([*server.children(recursive=True), server])


def clear_sessions(temp_dir: Path, token: Path) -> None:
    """End heads without a record, because their daemon died before it wrote one; keep the logs of the newest."""
    starter, member = json.dumps(str(temp_dir)), f"{temp_dir}/session_"
    while strays := _of_head(token, starter, member):  # a starter may have started another process meanwhile
        _kill(strays)
    sessions = sorted(p for p in temp_dir.glob("session_*") if p.is_dir() and not p.is_symlink())
    until = time.monotonic() + CLEAR_SECONDS
    for session in sessions[:-1]:
        trees.remove(session, until=until)


def _of_head(token: Path, *markers: str) -> list[psutil.Process]:
    """List this user's processes that have one of ``markers`` on their command line and read this ``token``.

    A path on a command line alone proves nothing: an editor that shows a log has it, and so may the program that
    started the daemon.
    """
    found, until = [], time.monotonic() + EXEC_SECONDS
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = _once_set(process, process.cmdline, until)
            if any(marker in part for part in line or () for marker in markers):
                environ = _once_set(process, process.environ, until)
                if environ and environ.get(TOKEN_PATH) == str(token):
                    found.append(process)
    return found


def _once_set(process: psutil.Process, read: Callable[[], T], until: float) -> T:
    """Return ``read()``; retry until ``until`` while it is empty, as during an exec, but not for a kernel thread."""
    while not (value := read()) and process.exe() and time.monotonic() < until:
        time.sleep(0.001)
    return value


def _kill(victims: list[psutil.Process]) -> None:
    for victim in victims:
        with contextlib.suppress(psutil.Error):
            victim.send_signal(signal.SIGKILL)
    wait_ended(victims, END_SECONDS)


def is_alive(pid: int, created: float) -> bool:
    """Whether the process that started at ``created`` (Unix seconds) still runs; another one with its id does not count."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
