"""The program that an embedded head's raylet starts in place of Ray's dashboard agent: it forks the workers.

A raylet does not start without a dashboard agent. Ray's own serves the dashboard, metrics and submissions of Ray's job server,
none of which orch uses; it takes 80 MB, 0.5 % of a core, and 1.4 s of processor time at each start.

A worker that begins as a program of its own takes 1 s of processor time for its imports. This process has imported the same
modules, runs no thread, and has called nothing in Ray: a fork of it becomes a worker in a fifth of the time, and shares
its memory. ``worker_setup.py`` requests a fork, and starts the worker itself if there is no answer. Each connection is
served by the fork that becomes the worker, so a caller cannot delay the next one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.runtime.cluster.head.late_agent import RAYLET_PID
from orchestrator.runtime.cluster.head.worker_setup import (
    GO,
    HANDLES,
    HERE,
    OOM_SCORE,
    REPLY_SECONDS,
    SIZE,
    is_own,
)

ANY_JOB: Final = {"RAY_JOB_ID": "ffffffff"}
"""Ray reads this once, when it is imported: the workers of a template, like those that are started ahead, serve any job."""

UNUSED_PORT: Final = 1
"""The port that is reported to the raylet: no process of a user can listen there, so calls are refused at once."""

PRELOADED: Final = ("ray._private.node", "ray._private.worker", "orchestrator.runtime.cluster.worker_preload")
"""The modules that Ray's worker program imports, and those that a rank actor needs."""

BACKLOG: Final = 128


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a worker: what it would have if it were executed as a program of its own."""

    argv: list[str]  # the worker's program and its arguments
    environ: dict[str, str]
    directory: str
    leads_group: bool  # has its own process group: Ray ends the processes that it leaves there
    oom_score_adj: str
    handles: list[int]  # standard input, output and error


def command(python: str, path: str) -> list[str]:
    """Return the command line that runs this program with the socket ``path``.

    A fork keeps it until it renames itself: ``path`` contains the session's, by which forks of a dead head are found.
    """
    return [python, __file__, path]


def fork_workers(path: str, raylet: int) -> Request | None:
    """Serve requests at the socket ``path`` until the process ``raylet`` ends, then return None; in a fork, return its request.

    A fork ends here if its caller has given up.
    """
    ended = os.pidfd_open(raylet)
    with listen(path) as listener:
        import_what_workers_import()
        while True:
            ready, _, _ = select.select([listener.fileno(), ended], [], [])
            if ended in ready:
                return None
            connection = accept(listener)
            if connection is None:
                continue
            if os.fork() == 0:
                break
            connection.close()
    os.close(ended)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = receive(connection)
    if request is None:
        os._exit(1)
    return request


def listen(path: str) -> socket.socket:
    """Listen at ``path``; called before the imports: an early caller waits for them, no longer than for its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks that have ended
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}-")
    listener.listen(BACKLOG)
    Path(f"{path}-").rename(path)  # where nothing listens at the path, the template has ended
    return listener


def import_what_workers_import() -> None:
    """Import Ray and what a rank actor needs, excluded from garbage collection, so that its memory stays shared."""
    os.environ.update(ANY_JOB)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def accept(listener: socket.socket) -> socket.socket | None:
    """Accept the next connection and return it; None if it has ended, or is another user's."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    if is_own(connection):
        return connection
    connection.close()
    return None


def receive(connection: socket.socket) -> Request | None:
    """Return the request, or None if the caller has given up: it then starts the worker itself."""
    connection.settimeout(REPLY_SECONDS)
    with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
        size, handles, _, _ = socket.recv_fds(connection, SIZE.size, HANDLES)
        fields: dict[str, Any] = json.loads(_exactly(connection, *SIZE.unpack(size)))
        request = Request(
            argv=fields["argv"],
            environ=fields["environ"],
            directory=fields["directory"],
            leads_group=fields["leads_group"],
            oom_score_adj=fields["oom_score_adj"],
            handles=handles,
        )
        connection.sendall(HERE)
        if len(handles) == HANDLES and _exactly(connection, len(GO)) == GO:
            return request
    return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = connection.recv(size - len(content))
        if not piece:
            raise ConnectionError("the caller has ended")
        content += piece
    return content


def become(request: Request) -> None:
    """Run the worker's program as if it had been executed with ``request``."""
    for number, handle in enumerate(request.handles):
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(request.environ | ANY_JOB)
    os.chdir(request.directory)
    if request.leads_group:
        os.setpgid(0, 0)
    with contextlib.suppress(OSError):
        Path(OOM_SCORE).write_text(request.oom_score_adj, encoding="ascii")
    sys.argv = request.argv
    sys.path.insert(0, str(Path(request.argv[0]).parent))
    runpy.run_path(request.argv[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this file's directory: its modules are not top-level ones
    _request = fork_workers(sys.argv[1], int(os.environ[RAYLET_PID]))
    if _request is not None:
        become(_request)
