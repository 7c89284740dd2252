"""Identifies the process at the other end of a Unix socket, and whether it is stopped.

For the command line, only when there is no answer: standard library only.
"""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
_CGROUPS = "/sys/fs/cgroup"


def credentials(sock: socket.socket) -> tuple[int, int, int] | None:
    """Return process id, user and group of the other end, from its peer credentials; None for another kind of socket.

    The process id is 0 where the process belongs to a PID namespace that cannot be seen from here.
    """
    if sock.family != socket.AF_UNIX:
        return None
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def is_stopped(pid: int) -> bool:
    """Return whether the process exists and is stopped: by SIGSTOP, by a debugger, or by its cgroup's freezer."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read(4096).rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in {b"T", b"t"} or _is_frozen(pid)


def _is_frozen(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            paths = [line.rstrip("\n").removeprefix("0::") for line in file if line.startswith("0::")]
        if not paths:
            return False
        with open(os.path.join(_CGROUPS, paths[0].lstrip("/"), "cgroup.events"), encoding="utf-8") as file:
            return "frozen 1" in file.read().splitlines()
    except OSError:
        return False
