"""Finds processes of a home, and waits for their ends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil

from orchestrator.runtime.cluster.head import of_session
from tests.support.stack import PATIENCE_SECONDS, Stack, process_gone, wait_until


def tree(*pids: int) -> list[int]:
    """Return the processes and all their descendants."""
    found = list(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return found


def parent(pid: int) -> int:
    """Return the process's parent: for a rank, its keeper."""
    return psutil.Process(pid).ppid()


def command_line(process: psutil.Process) -> list[str]:
    """Return the command line of the process; empty for one that has ended, reaped or not."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def actor_pids(stack: Stack, job_id: str) -> list[int]:
    """Return the process ids of the actors of the job's newest gang, by rank."""
    placed = [e for e in stack.client.events(job_id) if e.kind == "gang_placed"][-1]
    return [seat["actor_pid"] for seat in placed.body["seats"]]


def ray_workers(stack: Stack, title: str) -> list[psutil.Process]:
    """Return the worker processes of the home's Ray with ``title`` in their titles, except those that end meanwhile."""
    workers = of_session(stack.head_pids()["raylet"])
    return [worker for worker in workers if any(title in part for part in command_line(worker))]


def node_agents(stack: Stack) -> list[int]:
    """Return the process ids of the home's node agents."""
    return [process.pid for process in ray_workers(stack, "NodeAgent")]


def listening_on(pids: list[int]) -> set[str]:
    """Return the addresses at which these processes and their children listen, except those that end meanwhile."""
    found = set()
    for pid in tree(*pids):
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(pid).net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.ip)
    return found


def kill_each(*pids: int) -> None:
    """Send SIGKILL to each process; a process that has ended already is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def all_gone(what: str, pids: list[int], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until none of the processes is left."""
    wait_until(f"{what}: {pids} are gone", lambda: all(process_gone(pid) for pid in pids), seconds, interval=0.005)


def of_cwd(directory: Path) -> list[int]:
    """Return every live process with its working directory in ``directory`` or below it."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(os.readlink(f"/proc/{process.pid}/cwd")).is_relative_to(directory):
                found.append(process.pid)
    return [pid for pid in found if not process_gone(pid)]


def own_umask() -> int:
    """Return the umask of this process, which ranks inherit as after a plain start."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
