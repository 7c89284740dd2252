"""The program that an embedded head's raylet starts in place of Ray's runtime-environment agent: it becomes that agent when it is called.

Only a job with a ``runtime_env`` needs the agent, which takes 85 MB and 1.2 s of processor time, and which a raylet waits for
when it starts. This program listens in its place. At the first connection of its own user, who alone can have the
cluster's token, it executes the agent, which takes over the socket and the connection. Connections of other users are closed.

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
_ESTABLISHED = "01"


def command(python: str, address: str, port_file: str) -> list[str]:
    """Return the arguments to put before the command of Ray's agent."""
    return [python, "-I", "-S", __file__, address, port_file]


def wait_for_a_call(address: str, port_file: str, raylet: int) -> tuple[socket.socket, socket.socket] | None:
    """Listen, write the port to a file, and return the socket and its first connection; None when the raylet has ended."""
    ended = os.pidfd_open(raylet)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(BACKLOG)
    _write(port_file, str(listener.getsockname()[1]))
    while True:
        ready, _, _ = select.select([listener.fileno(), ended], [], [])
        if ended in ready:
            return None
        connection, _ = listener.accept()
        if is_of_this_user(connection):
            return listener, connection
        connection.close()


def is_of_this_user(connection: socket.socket, uid: int | None = None) -> bool:
    """Whether the other end belongs to a process of this user on this machine, as the kernel lists it."""
    try:
        ends = [_listed(end) for end in (connection.getpeername(), connection.getsockname())]
    except OSError:  # it has closed
        return False
    table = "/proc/net/tcp6" if connection.family == socket.AF_INET6 else "/proc/net/tcp"
    with open(table, encoding="ascii") as file:  # noqa: PTH123 - pathlib is larger than all else here
        for line in file:
            fields = line.split()
            if fields[1:3] == ends and fields[3] == _ESTABLISHED:  # others are listed as root's
                return int(fields[7]) == (os.getuid() if uid is None else uid)
    return False


def _listed(end: tuple[str, int]) -> str:
    """Return an address and port as the kernel's table has them: words of four bytes, the last byte first."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in end[0] else socket.AF_INET, end[0])
    words = b"".join(packed[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(packed), 4))
    return f"{words.hex().upper()}:{end[1]:04X}"


def _write(path: str, content: str) -> None:
    """Write a file atomically: readers never see a part of it."""
    handle = os.open(f"{path}-", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.write(handle, content.encode())
    os.close(handle)
    os.replace(f"{path}-", path)  # noqa: PTH105 - pathlib is larger than all else here


def execute(command_line: list[str], listener: socket.socket, connection: socket.socket) -> None:
    """Replace this process by Ray's agent, to which ``serve`` hands the socket and its first connection."""
    program = next(number for number, part in enumerate(command_line) if part.endswith(".py"))
    handles = []
    for each in (listener, connection):
        each.set_inheritable(True)
        handles.append(str(each.fileno()))
    python, *options = command_line[:program]
    os.execv(python, [python, *options, __file__, _SOCKET, *handles, *command_line[program:]])


class _Listener(socket.socket):
    """A listening socket with a connection that was accepted before."""

    accepted: tuple[socket.socket, object] | None = None

    def accept(self) -> tuple[socket.socket, object]:
        """Return that connection first; the caller waits until another one arrives."""
        first, self.accepted = self.accepted, None
        return first or super().accept()


def serve(handle: int, accepted: int, program: str, arguments: list[str]) -> None:
    """Run Ray's agent; it serves at the socket ``handle``, and its connection ``accepted``, in place of one of its own."""
    import importlib
    import runpy
    from typing import Any

    agent = os.path.dirname(program)  # noqa: PTH120 - as above
    sys.path[:1] = [agent, os.path.join(agent, "thirdparty_files")]  # noqa: PTH118
    web: Any = importlib.import_module("aiohttp.web")
    listener, connection = _Listener(fileno=handle), socket.socket(fileno=accepted)
    listener.accepted = connection, connection.getpeername()
    waker = socket.create_connection(listener.getsockname()[:2])  # the server accepts when there is something to accept
    run_app = web.run_app

    def at_the_socket(app: Any, *, sock: socket.socket, loop: Any) -> None:
        sock.close()
        waker.close()
        run_app(app, sock=listener, loop=loop)

    web.run_app = at_the_socket
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == _SOCKET:
        serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
    else:
        _called = wait_for_a_call(sys.argv[1], sys.argv[2], int(os.environ[RAYLET_PID]))
        if _called is not None:
            execute(sys.argv[3:], *_called)
