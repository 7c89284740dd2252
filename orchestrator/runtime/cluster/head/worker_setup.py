"""The program that an embedded head's raylet starts for each worker: it replaces itself by the worker at once.

Ray's own ``setup_worker.py`` prepares a ``runtime_env`` and then replaces itself by the worker. To do so it imports all of
Ray, and so does the worker after it: 0.5 s of processor time for every actor. Without a ``runtime_env`` there is nothing
to prepare: the template of workers (``worker_template.py``) forks one, or, where none answers, this program executes one.
With a ``runtime_env`` it executes Ray's own.

The raylet runs this file by its path. It imports nothing of orch or Ray.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from typing import Final

RAYS_OWN: Final = "setup_worker.py"
"""Ray's program, beside the worker's."""

TEMPLATE_SOCKET: Final = "ORCH_WORKER_TEMPLATE"
"""The environment variable with the path of the template's socket; absent where there is no template."""

SIZE: Final = struct.Struct("=I")
HANDLES: Final = 3
HERE: Final = b"H"
GO: Final = b"G"
"""The fork sends HERE, and becomes the worker only after GO, which this program sends last: so there is only one."""

REPLY_SECONDS: Final = 15.0
"""How long the template may take, including its imports on a busy machine; then this program executes a worker."""

OOM_SCORE: Final = "/proc/self/oom_score_adj"
RETRY_SECONDS: Final = 0.01

_CREDENTIALS: Final = struct.Struct("3i")
_CONTEXT: Final = "--serialized-runtime-env-context"
_LANGUAGE: Final = "--language"


def command(arguments: list[str], python: str) -> list[str]:
    """Return the command to execute with ``python``, from the arguments that the raylet gives."""
    options: dict[str, str] = {}
    passed_on: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in (_CONTEXT, _LANGUAGE):
            options[name] = value if equals else next(remaining, "")
        else:
            passed_on.append(argument)
    if options.get(_LANGUAGE) == "PYTHON" and _is_plain(options.get(_CONTEXT, ""), python):
        return [python, *passed_on]
    beside, _, _ = next(argument for argument in passed_on if argument.endswith(".py")).rpartition("/")
    return [python, f"{beside}/{RAYS_OWN}", *arguments]


def _is_plain(context: str, python: str) -> bool:
    """Whether the worker needs no preparation and runs in this interpreter."""
    try:
        wanted = json.loads(context or "{}")
    except ValueError:
        return False
    return isinstance(wanted, dict) and not any(
        value for name, value in wanted.items() if (name, value) != ("py_executable", python)
    )


def fork_from_template(arguments: list[str], path: str, seconds: float = REPLY_SECONDS) -> bool:
    """Have the template at ``path`` fork the worker; return whether it did. If not, it never will."""
    deadline = time.monotonic() + seconds
    try:
        with connect(path, deadline) as connection:
            content = json.dumps(_request(arguments)).encode()
            socket.send_fds(connection, [SIZE.pack(len(content))], range(HANDLES))
            connection.sendall(content)
            if connection.recv(len(HERE)) != HERE:
                return False
            connection.sendall(GO)
            return True
    except OSError:
        return False


def connect(path: str, deadline: float) -> socket.socket:
    """Connect to the template, which the raylet starts at the same time as its first workers. Raises OSError."""
    while not os.path.exists(path) and time.monotonic() < deadline:  # noqa: PTH110 - pathlib costs as much as all else here
        time.sleep(RETRY_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(max(RETRY_SECONDS, deadline - time.monotonic()))
    try:
        connection.connect(path)
        if not is_own(connection):
            raise PermissionError(f"{path} is another user's")
    except OSError:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    _pid, user, _group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.getuid())


def _request(arguments: list[str]) -> dict[str, object]:
    handle = os.open(OOM_SCORE, os.O_RDONLY | os.O_CLOEXEC)
    oom_score_adj = os.read(handle, 16).decode()
    os.close(handle)
    return {
        "argv": arguments,
        "environ": dict(os.environ),
        "directory": os.getcwd(),  # noqa: PTH109 - pathlib costs as much as all else here
        "leads_group": os.getpgid(0) == os.getpid(),
        "oom_score_adj": oom_score_adj,
    }


if __name__ == "__main__":
    _command = command(sys.argv[1:], sys.executable)
    _template = os.environ.pop(TEMPLATE_SOCKET, "")  # a worker's own child processes must not inherit it
    _is_rays_own = _command[1].endswith(f"/{RAYS_OWN}")
    if not _template or _is_rays_own or not fork_from_template(_command[1:], _template):
        os.execv(_command[0], _command)
