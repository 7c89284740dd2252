"""Sends signals to a job's processes on this machine: found by the job's events, safe from reused process ids."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from orchestrator.api.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.client import Client
    from orchestrator.api.views import JobView


class RankProcesses:
    """The training process of one rank of a job, and its actor. ``job`` is the job at the start of the drill."""

    def __init__(self, client: Client, job: JobView, rank: int) -> None:
        self._client = client
        self._job = job
        self._rank = rank

    def require_here(self) -> None:
        """Raise RefusedError unless the rank runs on this machine."""
        job, rank = self._job, self._rank
        node = job.gpus[rank].node if rank < len(job.gpus) else "?"
        if node != socket.gethostname():
            raise RefusedError(
                f"rank {rank} of {job.id} runs on {node}, this is {socket.gethostname()}",
                hint=f"run the drill on {node}, or choose a rank of this machine with --rank",
            )

    def rank_pid(self) -> int:
        """Return the id of the present training process; 0 if there is none."""
        job = self._client.job(self._job.id)
        pid = job.gpus[self._rank].pid if self._rank < len(job.gpus) and job.state == "RUNNING" else None
        return pid or 0

    def actor_pid(self) -> int:
        """Return the process id of the newest gang's actor; 0 if no gang was placed."""
        placed = [e for e in self._client.events(self._job.id) if e.kind == "gang_placed"]
        return int(placed[-1].body["seats"][self._rank]["actor_pid"]) if placed else 0


def send_signal(find: Callable[[], int], what: str, number: signal.Signals = signal.SIGKILL) -> str:
    """Send a signal to the process that ``find`` returns both before and after it is held; return what was done.

    Raises RefusedError if ``find`` returns 0, another process the second time, or another user's process.
    """
    pid = find()
    try:
        held = os.pidfd_open(pid) if pid else -1
    except OSError:
        held = -1
    if held < 0:
        raise RefusedError(f"{what} has no process on this machine", hint="it is just being restarted: try again")
    try:
        if find() != pid:
            raise RefusedError(f"{what} was restarted just now", hint="try again")
        signal.pidfd_send_signal(held, number)
    except PermissionError as error:
        raise RefusedError(f"{what} is another user's process", hint="run the drill as the daemon's user") from error
    finally:
        os.close(held)
    did = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}.get(number, f"sent {number.name} to")
    return f"{did} {what} (process {pid})"
