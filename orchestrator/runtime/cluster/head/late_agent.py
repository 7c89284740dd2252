"""The program that an embedded head's raylet starts in place of Ray's runtime-environment agent: it becomes that agent when it is called.

Only a job with a ``runtime_env`` needs the agent, which takes 85 MB and 1.2 s of processor time, and which a raylet waits for
when it starts. This program listens in its place. At the first connection it executes the agent, which takes over the
socket and the waiting connection.

The raylet runs this file by its path: ``late_agent.py ADDRESS PORT_FILE PYTHON [OPTION...] PROGRAM [ARGUMENT...]``, the last
parts being Ray's own command. Until it is called it runs in isolated mode, without ``site``, and imports nothing large.
"""

from __future__ import annotations

import os
import select
import socket
import sys

RAYLET_PID = "RAY_RAYLET_PID"
"""The environment variable by which the raylet gives its process id to what it starts."""

BACKLOG = 128
_SOCKET = "--socket"


def command(python: str, address: str, port_file: str) -> list[str]:
    """Return the arguments to put before the command of Ray's agent."""
    return [python, "-I", "-S", __file__, address, port_file]


def wait_for_a_call(address: str, port_file: str, raylet: int) -> socket.socket | None:
    """Listen, write the port to a file, and return the socket at the first connection; None when the raylet has ended."""
    ended = os.pidfd_open(raylet)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(BACKLOG)
    _write(port_file, str(listener.getsockname()[1]))
    ready, _, _ = select.select([listener.fileno(), ended], [], [])
    return None if ended in ready else listener


def _write(path: str, content: str) -> None:
    """Write a file atomically: readers never see a part of it."""
    handle = os.open(f"{path}-", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.write(handle, content.encode())
    os.close(handle)
    os.replace(f"{path}-", path)  # noqa: PTH105 - pathlib is larger than all else here


def execute(command_line: list[str], listener: socket.socket) -> None:
    """Replace this process by Ray's agent, to which ``serve`` hands the socket."""
    program = next(number for number, part in enumerate(command_line) if part.endswith(".py"))
    listener.set_inheritable(True)
    python, *options = command_line[:program]
    os.execv(python, [python, *options, __file__, _SOCKET, str(listener.fileno()), *command_line[program:]])


def serve(handle: int, program: str, arguments: list[str]) -> None:
    """Run Ray's agent, and have it serve at the socket ``handle`` in place of one of its own."""
    import importlib
    import runpy
    from typing import Any

    agent = os.path.dirname(program)  # noqa: PTH120 - as above
    sys.path[:1] = [agent, os.path.join(agent, "thirdparty_files")]  # noqa: PTH118
    web: Any = importlib.import_module("aiohttp.web")
    listener = socket.socket(fileno=handle)
    run_app = web.run_app

    def at_the_socket(app: Any, *, sock: socket.socket, loop: Any) -> None:
        sock.close()
        run_app(app, sock=listener, loop=loop)

    web.run_app = at_the_socket
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == _SOCKET:
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        _listener = wait_for_a_call(sys.argv[1], sys.argv[2], int(os.environ[RAYLET_PID]))
        if _listener is not None:
            execute(sys.argv[3:], _listener)
